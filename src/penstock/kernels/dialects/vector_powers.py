"""Powers, and divisions that round down: templates of `vector_functions`."""

from __future__ import annotations

# Where the power of |x| is known, its sign, and what the standards say of zeros, ones, infinities and NaN.
POWER_ENDS = """
static inline $F pow_ends_$F($F x, $F y, $F power) {
    $F a = as_$F(as_$I(x) & ~$sign);
    power = (a == 0) | (a == INFINITY) ? ((a == 0) == (y < 0) ? ($F)(INFINITY) : ($F)(0)) : power;
    power = x != x ? x : y != y ? y : power;
    $I large = as_$F(as_$I(y) & ~$sign) >= $scale * 2;  // and so even
    $F small_y = large ? ($F)(0) : y;
    $I integer = __builtin_convertvector(small_y, $I);
    $I whole = __builtin_convertvector(integer, $F) == small_y;
    power = as_$F(as_$I(power) ^ (as_$I(x) & whole & integer << ($bits - 1)));
    power = (x < 0) & ~whole & (a < INFINITY) ? ($F)(NAN) : power;
    power = (x == -1) & (as_$I(y) << 1 == as_$I(($F)(INFINITY)) << 1) ? ($F)(1) : power;
    return (x == 1) | (y == 0) ? ($F)(1) : power;
}
"""
# In float32, by a logarithm and an exponential in float64; x is 2^n (1 + f).
POWER = """
static inline float8 power_of_parts(float8 n, float8 f, float8 y) {
    double8 wide = __builtin_convertvector(f, double8), s = wide / (2 + wide), z = s * s;
    double8 l = __builtin_convertvector(n, double8) + 2.8853900817779268 * (s + s * (z * $atanh));
    double8 p = l * __builtin_convertvector(y, double8);
    p = p < -200 ? (double8)(-200) : p;
    p = p > 200 ? (double8)(200) : p;
    double8 t = p + 6755399441055744.0, r = p - (t - 6755399441055744.0);
    double8 power = 1 + r * $exp2;
    return __builtin_convertvector(power * as_double8((as_long8(t) + 1023) << 52), float8);
}
"""
FLOAT_POWER = """
static inline float8 pow_parts_float8(float8 x, float8 y) {
    float8 f, n = log_parts_float8(as_float8(as_int8(x) & ~$sign), &f);
    return power_of_parts(n, f, y);
}
"""
TWICE_POWER = """
static inline float16 pow_parts_float16(float16 x, float16 y) {
    float16 f, n = log_parts_float16(as_float16(as_int16(x) & ~$sign), &f);
    return (float16)(power_of_parts(n.lo, f.lo, y.lo), power_of_parts(n.hi, f.hi, y.hi));
}
"""
# In float64 with twice the digits, as in fdlibm: a product of high parts is exact, and the low parts follow.
WIDE_POWER = """
static inline double8 high_part(double8 x) { return as_double8(as_long8(x) & (long)0xffffffff00000000); }
static inline double8 pow_parts_double8(double8 x, double8 y) {
    double8 a = as_double8(as_long8(x) & ~$sign), f, n = log_parts_double8(a, &f);
    double8 under = 1 / (2 + f), s = f * under, z = s * s;
    double8 s_high = high_part(s), m_high = high_part(2 + f), m_low = f - (m_high - 2);
    double8 s_low = under * ((f - s_high * m_high) - s_high * m_low);
    double8 rest = z * z * $three_atanh + s_low * (s_high + s), square = s_high * s_high;
    double8 c_high = high_part(3 + square + rest), c_low = rest - ((c_high - 3) - square);
    double8 u = s_high * c_high, v = s_low * c_high + c_low * s;
    double8 w_high = high_part(u + v), w_low = v - (w_high - u);
    double8 l = 0.9617962837219238 * w_high;
    double8 l_low = 4.102040517767816e-07 * w_high + w_low * 0.9617966939259756;
    double8 log_high = high_part((l + l_low) + n), log_low = l_low - ((log_high - n) - l);
    double8 y_high = high_part(y);
    double8 p = y_high * log_high, p_low = (y - y_high) * log_high + y * log_low;
    long8 is_end = ~(fabs(y) < INFINITY), many = is_end | ~(fabs(p + p_low) < 1100);
    p = is_end ? y * log_high : p;
    p_low = many ? (double8)(0) : p_low;
    p = p < -1100 ? (double8)(-1100) : p;
    p = p > 1100 ? (double8)(1100) : p;
    double8 t = p + 6755399441055744.0, r = (p - (t - 6755399441055744.0)) + p_low;
    double8 power = 1 + r * $exp2;
    long8 k = as_long8(t) - 0x4338000000000000, half_k = k >> 1;
    return power * as_double8((half_k + 1023) << 52) * as_double8((k - half_k + 1023) << 52);
}
"""
POW = """
static inline $F pow_$F($F x, $F y) { return pow_ends_$F(x, y, pow_parts_$F(x, y)); }
"""
# Of sizes whose quotient is not large: it is at most 1 too large, and its product with the divisor is exact.
FLOAT_REST = """
static inline float8 division_rest_float8(float8 a, float8 b, int8 *large) {
    double8 x = __builtin_convertvector(a, double8), y = __builtin_convertvector(b, double8), q = x / y;
    double8 r = x - trunc(q) * y;
    r = r < 0 ? r + y : r;
    *large = __builtin_convertvector(~(q < 536870912), int8);
    return __builtin_convertvector(r, float8);
}
"""
TWICE_REST = """
static inline float16 division_rest_float16(float16 a, float16 b, int16 *large) {
    int8 low, high;
    float8 r = division_rest_float8(a.lo, b.lo, &low), s = division_rest_float8(a.hi, b.hi, &high);
    *large = (int16)(low, high);
    return (float16)(r, s);
}
"""
WIDE_REST = """
static inline double8 division_rest_double8(double8 a, double8 b, long8 *large) {
    double8 q = a / b, r = fma(-trunc(q), b, a);
    *large = ~(q < 4503599627370496.0);
    return r < 0 ? r + b : r;
}
"""
# As NumPy's: the remainder has the sign of the divisor, and the quotient is that of what is divided exactly.
DIVISIONS = """
static inline $F truncated_rest_$F($F x, $F y) {
    $I sign = as_$I(x) & $sign, large;
    $F a = as_$F(as_$I(x) ^ sign), b = as_$F(as_$I(y) & ~$sign), r = division_rest_$F(a, b, &large);
    r = as_$F(as_$I(a < b ? a : r) | sign);
    if (ANY_$F(large))
        for (int lane = 0; lane < $width; lane++)
            if (large[lane]) r[lane] = fmod(x[lane], y[lane]);
    return r;
}
static inline $F remainder_$F($F x, $F y) {
    $F r = truncated_rest_$F(x, y);
    r = (r != 0) & ((y < 0) != (r < 0)) ? r + y : r;
    return r == 0 ? as_$F(as_$I(y) & $sign) : r;
}
static inline $F floor_divide_$F($F x, $F y) {
    $F r = truncated_rest_$F(x, y), q = x / y, whole = (x - r) / y;
    whole = (r != 0) & ((y < 0) != (r < 0)) ? whole - 1 : whole;
    $F down = floor(whole);
    down = whole - down > 0.5$f ? down + 1 : down;
    down = whole == 0 ? as_$F(as_$I(q) & $sign) : down;
    return (fabs(x) < INFINITY) & (fabs(y) < INFINITY) & (y != 0) ? down : y == 0 ? q : floor(q);
}
"""
