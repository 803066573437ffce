// Of constants too, which WGSL itself refuses where they are not finite.
fn bits_float(u: u32) -> f32 { return bitcast<f32>(u); }

// A value of which no compiler knows how it was computed.
fn opaque(x: f32, zero: u32) -> f32 { return bitcast<f32>(bitcast<u32>(x) + zero); }

fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

fn nan_of(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) | 0x7fc00000u); }

// By a choice: (bits & 0x7fffffff) | (sign & 0x80000000) is wrong in Mesa's software Vulkan with LLVM 15.
fn with_sign(x: f32, sign: f32) -> f32 {
    let size = abs(x);
    return select(size, -size, bitcast<u32>(sign) >= 0x80000000u);
}

fn largest(a: f32, b: f32) -> f32 {
    return select(select(select(b, a, a > b), b, is_nan(b)), a, is_nan(a));
}

fn smallest(a: f32, b: f32) -> f32 {
    return select(select(select(b, a, a < b), b, is_nan(b)), a, is_nan(a));
}

fn sign_1(x: f32) -> f32 {
    return select(select(0.0, with_sign(1.0, x), (bitcast<u32>(x) & 0x7fffffffu) != 0u), x, is_nan(x));
}

fn next_after(x: f32, y: f32) -> f32 {
    let u = bitcast<u32>(x);
    if (is_nan(x) || is_nan(y)) { return nan_of(x); }
    if (x == y) { return y; }
    if ((u & 0x7fffffffu) == 0u) { return bitcast<f32>((bitcast<u32>(y) & 0x80000000u) | 1u); }
    let away = (y > x) == (u < 0x80000000u);
    return bitcast<f32>(select(u - 1u, u + 1u, away));
}

fn long_bits(low: u32, high: u32) -> u64 { return u64(low) | (u64(high) << 32u); }

// Not `i64(x)`: Mesa 22 takes that to be never less than a constant.
fn widened(x: i32) -> i64 { return bitcast<i64>(long_bits(bitcast<u32>(x), bitcast<u32>(x >> 31u))); }

fn index_of(low: u32, high: u32, length: u32) -> i32 {
    return select(-1, i32(low), high == 0u && low < length);
}

fn part_16(word: u32, number: u32) -> u32 { return (word >> (16u * (number & 1u))) & 0xffffu; }

fn part_8(word: u32, number: u32) -> u32 { return (word >> (8u * (number & 3u))) & 0xffu; }

fn signed_16(u: u32) -> i32 { return bitcast<i32>(u << 16u) >> 16u; }

fn signed_8(u: u32) -> i32 { return bitcast<i32>(u << 24u) >> 24u; }

fn half_float(u: u32) -> f32 {
    let size = u & 0x7fffu;
    let wide = (size << 13u) + select(0x38000000u, 0x70000000u, size >= 0x7c00u);
    let small = bitcast<u32>(f32(size) * 5.9604644775390625e-8);  // 2 to the power of -24
    return bitcast<f32>(select(wide, small, size < 0x400u) | ((u & 0x8000u) << 16u));
}

fn float_half(x: f32) -> u32 {
    let u = bitcast<u32>(x);
    let size = u & 0x7fffffffu;
    var half = (size - 0x38000000u + 0xfffu + ((size >> 13u) & 1u)) >> 13u;
    if (size < 0x38800000u) { half = u32(round(bitcast<f32>(size) * 16777216.0)); }
    if (size >= 0x477ff000u) { half = 0x7c00u; }
    if (size > 0x7f800000u) { half = 0x7e00u; }
    return half | ((u >> 16u) & 0x8000u);
}

fn round_half(x: f32) -> f32 { return half_float(float_half(x)); }

fn bfloat_float(u: u32) -> f32 { return bitcast<f32>(u << 16u); }

fn float_bfloat(x: f32) -> u32 {
    let u = bitcast<u32>(x);
    return select(u + 0x7fffu + ((u >> 16u) & 1u), u | 0x400000u, is_nan(x)) >> 16u;
}

fn round_bfloat(x: f32) -> f32 { return bfloat_float(float_bfloat(x)); }

fn high_product(a: u32, b: u32) -> u32 {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let left = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let right = (a & 0xffffu) * (b >> 16u) + (left & 0xffffu);
    return (a >> 16u) * (b >> 16u) + (left >> 16u) + (right >> 16u);
}

fn philox(key_low: u32, key_high: u32, first_low: u32, first_high: u32, index: i32) -> u32 {
    var key0 = key_low;
    var key1 = key_high;
    var c0 = first_low + u32(index / 4);
    var c1 = first_high + select(0u, 1u, c0 < first_low);
    var c2 = 0u;
    var c3 = 0u;
    for (var turn = 0; turn < 10; turn++) {
        let low0 = c0 * 0xD2511F53u;
        let low1 = c2 * 0xCD9E8D57u;
        let high0 = high_product(c0, 0xD2511F53u);
        let high1 = high_product(c2, 0xCD9E8D57u);
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return select(select(c0, c1, (index & 1) == 1), select(c2, c3, (index & 1) == 1), (index & 2) == 2);
}

fn power_of_2(n: i32) -> f32 { return bitcast<f32>(u32(n + 127) << 23u); }

fn scaled(x: f32, n: i32) -> f32 {
    let part = n / 2;  // of which both powers are there, even if the whole is not
    return x * power_of_2(n - part) * power_of_2(part);
}

// The power of e to r, less 1, for r up to half of log(2).
fn exp_rest(r: f32) -> f32 {
    let p = 1.666651815e-1 + r * (4.166643322e-2 + r * (8.368990384e-3 + r * 1.393786632e-3));
    return r + r * r * (0.5 + r * p);
}

// What remains of x after n times log(2).
fn exp_reduced(x: f32, n: f32) -> f32 { return (x - n * 0.693115234375) - n * 3.1946183e-5; }

fn exp_1(x: f32) -> f32 {
    let c = clamp(x, -104.0, 89.0);
    let n = round(c * 1.44269504);
    let y = scaled(1.0 + exp_rest(exp_reduced(c, n)), i32(n));
    return select(y, x, is_nan(x));
}

fn expm1_1(x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    if (abs(x) < 0.34) { return with_sign(exp_rest(x), x); }  // of 0 too
    if (x > 17.0) { return exp_1(x) - 1.0; }
    let c = max(x, -18.0);
    let n = round(c * 1.44269504);
    let power = power_of_2(i32(n));
    return power * exp_rest(exp_reduced(c, n)) + (power - 1.0);
}

// The logarithm of 1 + f, for 1 + f between the square roots of 1/2 and 2.
fn log_rest(f: f32) -> f32 {
    let s = f / (2.0 + f);
    let z = s * s;
    let r = z * (6.666666269e-1 + z * (4.000085294e-1 + z * (2.850989997e-1 + z * 2.403393686e-1)));
    let half = 0.5 * f * f;
    return f - (half - s * (half + r));
}

// A positive x as 2 to the power of the first, times 1 plus the second, which log_rest takes.
fn log_parts(x: f32) -> vec2<f32> {
    let small = x < 1.17549435e-38;
    let u = bitcast<u32>(select(x, x * 8388608.0, small));
    let n = bitcast<i32>(u - 0x3f3504f3u) >> 23u;
    let m = bitcast<f32>(u - (bitcast<u32>(n) << 23u));
    return vec2<f32>(f32(select(n, n - 23, small)), m - 1.0);
}

// The logarithm of x to a base, given the scale from the natural one, and that of 2 as a sum.
fn log_scaled(x: f32, scale: f32, head: f32, tail: f32) -> f32 {
    let parts = log_parts(x);
    let y = parts.x * head + (log_rest(parts.y) * scale + parts.x * tail);
    let u = bitcast<u32>(x);
    if (u - 1u < 0x7f7fffffu) { return y; }
    if ((u & 0x7fffffffu) == 0u) { return bits_float(0xff800000u); }
    return select(nan_of(x), x, u == 0x7f800000u);
}

fn log_1(x: f32) -> f32 { return log_scaled(x, 1.0, 0.693115234375, 3.1946183e-5); }

fn log2_1(x: f32) -> f32 { return log_scaled(x, 1.44269504, 1.0, 0.0); }

fn log10_1(x: f32) -> f32 { return log_scaled(x, 0.434294482, 0.301025390625, 4.605039e-6); }

fn log1p_1(x: f32) -> f32 {
    if (x > -0.29 && x < 0.41) { return log_rest(x); }
    return log_1(1.0 + x);
}

fn sinh_1(x: f32) -> f32 {
    let a = abs(x);
    if (a < 1.0) {
        let e = expm1_1(a);
        return with_sign(0.5 * (e + e / (e + 1.0)), x);
    }
    let e = exp_1(select(a, 0.5 * a, a > 88.0));
    return with_sign(select(0.5 * e - 0.5 / e, 0.5 * e * e, a > 88.0), x);
}

fn cosh_1(x: f32) -> f32 {
    let a = abs(x);
    let e = exp_1(select(a, 0.5 * a, a > 88.0));
    return select(0.5 * e + 0.5 / e, 0.5 * e * e, a > 88.0);
}

fn tanh_1(x: f32) -> f32 {
    let z = x * x;
    var p = -5.370970716e-2 + z * (2.055340632e-2 - z * 5.617152728e-3);
    p = x * (9.999999957e-1 + z * (-3.333325488e-1 + z * (1.333099022e-1 + z * p)));
    return select(1.0 - 2.0 / (exp_1(x + x) + 1.0), p, z < 0.390625);
}

fn asinh_1(x: f32) -> f32 {
    let a = abs(x);
    if (a > 1.0e6) { return with_sign(log_1(a) + 0.693147181, x); }
    if (is_nan(x)) { return x; }
    return with_sign(log1p_1(a + a * a / (1.0 + sqrt(a * a + 1.0))), x);
}

fn acosh_1(x: f32) -> f32 {
    if (x > 1.0e6) { return log_1(x) + 0.693147181; }
    if (!(x >= 1.0)) { return nan_of(x); }
    let t = x - 1.0;
    return log1p_1(t + sqrt(t * (t + 2.0)));
}

fn atanh_1(x: f32) -> f32 {
    let a = abs(x);
    if (!(a <= 1.0)) { return nan_of(x); }
    if (a == 1.0) { return with_sign(bits_float(0x7f800000u), x); }
    return with_sign(0.5 * log1p_1(2.0 * a / (1.0 - a)), x);
}

struct Angle { rest: f32, quarter: u32 }

// An angle of any size, as its rest after quarters of a turn, to which it was rounded.
fn far_angle(x: f32) -> Angle {
    let u = bitcast<u32>(x);
    let m = (u & 0x7fffffu) | 0x800000u;
    // In units of quarters of a turn, all bits before this one stand for whole turns.
    let first = ((u >> 23u) & 0xffu) - 120u;
    let word = first >> 5u;
    let by = first & 31u;
    // 2 / pi, in words after the point, and none before it.
    var digits = array<u32, 8>(
        0u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu
    );
    var bits: array<u32, 3>;
    for (var k = 0u; k < 3u; k++) {
        let high = digits[word + k];
        bits[k] = select(high, (high << by) | (digits[word + k + 1u] >> (32u - by)), by != 0u);
    }
    let low = m * bits[1];
    let middle = low + high_product(m, bits[2]);
    var high = m * bits[0] + high_product(m, bits[1]) + select(0u, 1u, middle < low);
    var quarter = high >> 30u;
    high = (high << 2u) | (middle >> 30u);
    var after = middle << 2u;
    let above = high >= 0x80000000u;
    if (above) {
        quarter += 1u;
        high = ~high;
        after = ~after;
    }
    let zeros = countLeadingZeros(high);
    high = select(high, (high << zeros) | (after >> (32u - zeros)), zeros != 0u && zeros < 32u);
    var rest = f32(high) * 1.57079633 * power_of_2(-32 - i32(zeros));
    rest = select(rest, -rest, above);
    if (u >= 0x80000000u) { return Angle(-rest, 4u - (quarter & 3u)); }
    return Angle(rest, quarter);
}

fn angle(x: f32) -> Angle {
    if (abs(x) >= 8192.0) { return far_angle(x); }
    let n = round(x * 0.636619772);
    let rest = ((x - n * 1.5703125) - n * 4.837512969970703e-4) - n * 7.549533620476723e-8 - n * 2.563344e-12;
    return Angle(select(rest, x, abs(x) < 0.785), bitcast<u32>(i32(n)));
}

fn sine(r: f32) -> f32 {
    let z = r * r;
    let p = -1.666666716e-1 + z * (8.333372883e-3 + z * (-1.985029521e-4 + z * 2.804356882e-6));
    return with_sign(r + r * z * p, r);  // of 0 too
}

fn cosine(r: f32) -> f32 {
    let z = r * r;
    return 1.0 - 0.5 * z + z * z * (4.166664556e-2 + z * (-1.388731180e-3 + z * 2.443274207e-5));
}

fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }

fn turned(a: Angle) -> f32 {
    let y = select(sine(a.rest), cosine(a.rest), (a.quarter & 1u) == 1u);
    return select(y, -y, (a.quarter & 2u) == 2u);
}

fn sin_1(x: f32) -> f32 {
    if (!is_finite(x)) { return nan_of(x); }
    return turned(angle(x));
}

fn cos_1(x: f32) -> f32 {
    if (!is_finite(x)) { return nan_of(x); }
    let a = angle(x);
    return turned(Angle(a.rest, a.quarter + 1u));
}

fn tan_1(x: f32) -> f32 {
    if (!is_finite(x)) { return nan_of(x); }
    let a = angle(x);
    let s = sine(a.rest);
    let c = cosine(a.rest);
    return select(s / c, -c / s, (a.quarter & 1u) == 1u);
}

fn asin_small(x: f32) -> f32 {
    let z = x * x;
    let p = 4.451434314e-2 + z * (3.182839975e-2 + z * (1.436348539e-2 + z * 3.761860356e-2));
    return x + x * z * (1.666665971e-1 + z * (7.500518858e-2 + z * p));
}

fn asin_1(x: f32) -> f32 {
    let a = abs(x);
    if (!(a <= 1.0)) { return nan_of(x); }
    if (a <= 0.5) { return asin_small(x); }
    return with_sign(1.57079633 - 2.0 * asin_small(sqrt(0.5 * (1.0 - a))), x);
}

fn acos_1(x: f32) -> f32 {
    let a = abs(x);
    if (!(a <= 1.0)) { return nan_of(x); }
    if (a <= 0.5) { return 1.57079633 - asin_small(x); }
    let y = 2.0 * asin_small(sqrt(0.5 * (1.0 - a)));
    return select(y, 3.14159265 - y, x < 0.0);
}

// The angle whose tangent is small / large, both positive, the first no more than the second.
fn atan_quotient(small: f32, large: f32) -> f32 {
    let beyond = small > 0.414213562 * large;
    let t = select(small, small - large, beyond) / select(large, small + large, beyond);
    let z = t * t;
    let p = 1.999853253e-1 + z * (-1.424450725e-1 + z * (1.060011685e-1 - z * 6.092517450e-2));
    return select(0.0, 0.785398163, beyond) + (t + t * z * (-3.333331645e-1 + z * p));
}

fn atan_1(x: f32) -> f32 {
    let a = abs(x);
    if (is_nan(x)) { return x; }
    if (a > 3.0e7) { return with_sign(1.57079633, x); }
    let y = atan_quotient(min(a, 1.0), max(a, 1.0));
    return with_sign(select(y, 1.57079633 - y, a > 1.0), x);
}

fn atan2_1(y: f32, x: f32) -> f32 {
    if (is_nan(x)) { return x; }
    if (is_nan(y)) { return y; }
    var a = abs(y);
    var b = abs(x);
    if (!is_finite(x) || !is_finite(y)) {
        a = select(1.0, 0.0, is_finite(y));
        b = select(1.0, 0.0, is_finite(x));
    }
    if (max(a, b) > 1.0e37) {
        a *= 0.0625;
        b *= 0.0625;
    }
    if (max(a, b) < 1.0e-30) {
        a *= 16777216.0;
        b *= 16777216.0;
    }
    var angle = 0.0;
    if (max(a, b) > 0.0) { angle = atan_quotient(min(a, b), max(a, b)); }
    if (a > b) { angle = 1.57079633 - angle; }
    if (bitcast<u32>(x) >= 0x80000000u) { angle = 3.14159265 - angle; }
    return with_sign(angle, y);
}

fn hypot_1(x: f32, y: f32) -> f32 {
    let infinite = bits_float(0x7f800000u);
    if (abs(x) == infinite || abs(y) == infinite) { return infinite; }
    if (is_nan(x)) { return x; }
    if (is_nan(y)) { return y; }
    let large = max(abs(x), abs(y));
    if (large == 0.0) { return 0.0; }
    let q = min(abs(x), abs(y)) / large;
    return large * sqrt(1.0 + q * q);
}

fn head_of(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u); }  // its first 12 digits

// x to the power of y, for a positive x that is a number: 2 to the power of y times a logarithm of 32 digits.
fn pow_positive(x: f32, y: f32) -> f32 {
    let parts = log_parts(x);
    let f = parts.y;
    let t = 2.0 + f;
    let t_head = head_of(t);
    let s = f / t;
    let s_head = head_of(s);
    let s_tail = ((f - s_head * t_head) - s_head * (f - (t_head - 2.0))) / t;
    let z = s * s;
    let p = 3.333333135e-1 + z * (2.000042647e-1 + z * (1.425494999e-1 + z * 1.201696843e-1));
    let tail = s_tail + s * z * p;
    let first = 2.884765625 * s_head;
    let second = 6.244568e-4 * s_head + 2.88539 * tail;
    let whole = parts.x + (first + second);
    let log_head = head_of(whole);
    let log_tail = ((parts.x - log_head) + first) + second;
    let about = y * whole;
    if (about > 129.0) { return bits_float(0x7f800000u); }
    if (about < -151.0) { return 0.0; }
    let y_head = head_of(y);
    let high = y_head * log_head;
    let low = (y - y_head) * log_head + y * log_tail;
    let n = round(high + low);
    return scaled(1.0 + exp_rest(((high - n) + low) * 0.693147181), i32(n));
}

fn pow_1(x: f32, y: f32) -> f32 {
    let size = bitcast<u32>(x) & 0x7fffffffu;
    let exponent = bitcast<u32>(y) & 0x7fffffffu;
    if (exponent == 0u || bitcast<u32>(x) == 0x3f800000u) { return 1.0; }
    if (is_nan(x)) { return x; }
    if (is_nan(y)) { return y; }
    let negative = bitcast<u32>(x) >= 0x80000000u;
    let down = bitcast<u32>(y) >= 0x80000000u;
    // From 2 to the power of 24 on, all numbers are even; infinities are.
    let whole = exponent >= 0x4b800000u || y == trunc(y);
    let odd = whole && exponent < 0x4b800000u && (i32(y) & 1) == 1;
    var result = 0.0;
    if (exponent == 0x7f800000u) {
        if (size == 0x3f800000u) { return 1.0; }
        result = select(0.0, bits_float(0x7f800000u), (size > 0x3f800000u) != down);
    } else if (size == 0u || size == 0x7f800000u) {
        result = select(0.0, bits_float(0x7f800000u), (size == 0u) == down);
    } else {
        if (negative && !whole) { return nan_of(x); }
        result = pow_positive(abs(x), y);
    }
    return select(result, -result, negative && odd);
}
