"""Functions of vectors for CPUs, in OpenCL C: faster than PoCL's, and with the same bits in every lane.

Most are to 1 or 2 units in the last place, and none is off by more than 4. Products and sums of an expression
may be contracted; the reductions of arguments are exact in either case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template

from penstock.kernels.dialects import vector_powers
from penstock.kernels.dialects.vector_numbers import DOUBLE, FLOAT


@dataclass(frozen=True)
class _Vectors:
    """A type of vectors: its items, how many they are, and the numbers that functions need."""

    item: str
    width: int
    numbers: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.item}{self.width}"

    def text(self, template: str) -> str:
        """A template for this type. $F, $I: floating-point numbers and integers of its size; $f: a suffix."""
        integer = "int" if self.item == "float" else "long"
        types = {"F": self.name, "I": f"{integer}{self.width}", "width": str(self.width)}
        return Template(template).substitute(self.numbers, **types)


# x is n log(2) plus a remainder r; n comes from the low bits of a sum that rounds.
_REMAINDER = """
static inline $F exp_remainder_$F($F x, $I *n) {
    $F t = x * $log2_e + $magic, k = t - $magic;
    *n = as_$I(t) - $magic_bits;
    $F r = x - k * $ln2_high;
    return r - k * $ln2_low;
}
"""
# expm1: 2^n (1 + p) - 1, with half of the power, which may be too large. sinh and cosh: with the hyperbolic
# functions of r, so that nothing cancels near 0; a quarter of the powers of 2 and 1/2.
_EXPONENTIALS = """
static inline $F expm1_$F($F x) {
    $F c = x < $low_expm1 ? ($F)($low_expm1) : x;
    c = c > $high_expm1 ? ($F)($high_expm1) : c;
    $I n;
    $F r = exp_remainder_$F(c, &n);
    $F p = r + r * r * $expm1;
    $F s = as_$F((n + ($bias - 1)) << $digits);
    $F y = 2 * (s * p + (s - 0.5$f));
    return x * x > 0 ? y : x;
}
static inline void hyperbolic_parts_$F($F x, $F *a, $F *b, $F *up, $F *down) {
    $I n;
    $F c = x > $high_sinh ? ($F)($high_sinh) : x;
    $F r = exp_remainder_$F(c, &n), z = r * r;
    *a = 1 + z * $cosh;
    *b = r + r * (z * $sinh);
    $I below = $bias - 2 - n;
    *up = as_$F((n + ($bias - 2)) << $digits);
    *down = as_$F((below > 0 ? below : ($I)(0)) << $digits);
}
static inline $F sinh_$F($F x) {
    $I sign = as_$I(x) & $sign;
    $F a, b, up, down;
    hyperbolic_parts_$F(as_$F(as_$I(x) ^ sign), &a, &b, &up, &down);
    return as_$F(as_$I(2 * (a * (up - down) + b * (up + down))) | sign);
}
static inline $F cosh_$F($F x) {
    $F a, b, up, down;
    hyperbolic_parts_$F(as_$F(as_$I(x) & ~$sign), &a, &b, &up, &down);
    return 2 * (a * (up + down) + b * (up - down));
}
"""
# In float32 by other ways, to 1 and 3 units in the last place. exp: n goes into the exponent, and subnormal
# results are flushed to 0. tanh: |x| is n log(2) / 2 plus a remainder r, whose tanh is r / q; with h, which
# is half of 2^n - 1, that of the sum is (r + h (q + r)) / (q + h (q + r)). From 9.1 on it is 1.
_QUICK = """
static inline $F exp_$F($F x) {
    $F c = x < -87.3365479f ? ($F)(-87.3365479f) : x;
    c = c > 88.7228317f ? ($F)(88.7228317f) : c;
    $F t = c * 1.44269504f + 12582912.0f;
    $F n = t - 12582912.0f;
    $F r = c - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    $F p = 4.166644833e-2f + r * (8.364383390e-3f + r * 1.393545454e-3f);
    p = 1.0f + (r + r * r * (5.000000015e-1f + r * (1.666656960e-1f + r * p)));
    $F y = as_$F(as_$I(p) + (as_$I(t) << 23));
    y = x < -87.3365479f ? ($F)(0.0f) : y;
    return !(x <= 88.7228317f) ? x * INFINITY : y;  // infinity or NaN
}
static inline $F tanh_$F($F x) {
    $I sign = as_$I(x) & $sign;
    $F a = as_$F(as_$I(x) ^ sign);
    a = a > 9.1f ? ($F)(9.1f) : a;
    $F t = a * 2.88539008f + 12583038.0f;  // its low bits are those of the exponent of 2^n / 2
    $F r = a - (t - 12583038.0f) * 0.34657359f;
    $F s = r * r;
    $F q = 1.0f + s * (3.333325088e-01f + s * -2.213409357e-02f);
    $F h = as_$F(as_$I(t) << 23) - 0.5f;
    $F v = q + r;
    return as_$F(as_$I((r + h * v) / (q + h * v)) | sign);
}
"""
# Near 0 an odd polynomial, elsewhere 1 - exp(P(|x|)); the coefficients are those of N. Juffa.
_ERROR_FUNCTION = """
static inline $F erf_$F($F x) {
    $I sign = as_$I(x) & $sign;
    $F a = as_$F(as_$I(x) ^ sign), s = x * x;
    $F t = a > 4 ? ($F)(4) : a;
    $F far = -6.34846687e-1f + t * (-1.06777877e-1f + t * ((2.42546219e-2f + t * -3.88396438e-3f)
        + t * t * (3.83197126e-4f + t * -1.72853470e-5f)));
    far = 1 - exp_$F(t * (-1.28717512e-1f + t * far) - t);
    $F near = x + x * (1.28379166e-1f + s * (-3.76125336e-1f + s * (1.12819925e-1f + s * (-2.67681349e-2f
        + s * (4.99119423e-3f + s * -5.96761703e-4f)))));
    return a > 0.927734375f ? as_$F(as_$I(far) | sign) : near;
}
"""
# The power of 2 in two factors, so that subnormal results are rounded.
_WIDE_EXPONENTIALS = """
static inline $F exp_$F($F x) {
    $F c = x < -746 ? ($F)(-746) : x;
    c = c > 710 ? ($F)(710) : c;
    $I n;
    $F r = exp_remainder_$F(c, &n);
    $F p = 1 + (r + r * r * $expm1);
    $I half_n = n >> 1;
    return p * as_$F((half_n + $bias) << $digits) * as_$F((n - half_n + $bias) << $digits);
}
static inline $F tanh_$F($F x) {
    $I sign = as_$I(x) & $sign;
    $F e = expm1_$F(-2 * as_$F(as_$I(x) ^ sign));
    return as_$F(as_$I(-e / (2 + e)) | sign);
}
"""
# x is 2^n (1 + f), and 1 + f between the roots of 1/2 and 2. log1p: 1 + x loses digits of x, which are added.
_LOG_PARTS = """
static inline $F log_parts_$F($F x, $F *f) {
    $I low = x < $tiny;
    $I bits = as_$I(low ? x * $scale : x) - $half_root;
    *f = as_$F((bits & $fraction) + $half_root) - 1;
    $I n = (bits >> $digits) + (low & -$digits);
    return as_$F(n + $magic_bits) - $magic;
}
"""
_LOGARITHMS = """
static inline $F log_ends_$F($F x, $F y) {
    y = x == INFINITY ? x : y;
    return x > 0 ? y : x == 0 ? ($F)(-INFINITY) : ($F)(NAN);
}
static inline $F log_$F($F x) {
    $F f, n = log_parts_$F(x, &f), r = $log_rest;
    return log_ends_$F(x, n * $ln2_high + ((n * $ln2_low + r) + f));
}
static inline $F log2_$F($F x) {
    $F f, n = log_parts_$F(x, &f), r = $log_rest;
    return log_ends_$F(x, n + (f * $log2_e + r * $log2_e));
}
static inline $F log10_$F($F x) {
    $F f, n = log_parts_$F(x, &f), r = $log_rest;
    return log_ends_$F(x, n * $lg2_high + ((n * $lg2_low + r * $lg_e) + f * $lg_e));
}
static inline $F log1p_$F($F x) {
    $F u = 1 + x, f, n = log_parts_$F(u, &f);
    f = n == 0 ? x : f;
    $F lost = n == 0 ? ($F)(0) : (x - (u - 1)) / u, r = $log_rest;
    $F y = log_ends_$F(u, n * $ln2_high + ((n * $ln2_low + (r + lost)) + f));
    return x == 0 ? x : x == INFINITY ? x : y;
}
static inline $F asinh_$F($F x) {
    $I sign = as_$I(x) & $sign;
    $F a = as_$F(as_$I(x) ^ sign), s = a * a;
    $I many = a > $many;
    $F y = log1p_$F(many ? a - 1 : a + s / (1 + sqrt(s + 1)));
    y = many ? y + 0.693147180559945309$f : y;
    return as_$F(as_$I(y) | sign);
}
static inline $F acosh_$F($F x) {
    $I many = x > $many;
    $F t = x - 1, y = log1p_$F(many ? t : t + sqrt(t * (x + 1)));
    y = many ? y + 0.693147180559945309$f : y;
    return x < 1 ? ($F)(NAN) : y;
}
static inline $F atanh_$F($F x) {
    $I sign = as_$I(x) & $sign;
    $F a = as_$F(as_$I(x) ^ sign);
    return as_$F(as_$I(0.5$f * log1p_$F((a + a) / (1 - a))) | sign);
}
"""
# Whether any lane is true, by instructions of x86: PoCL's takes as long as half of a sine.
_ANY = """
#ifdef __AVX__
#define ANY_float8(truths) (__builtin_ia32_movmskps256(as_float8(truths)) != 0)
#define ANY_double8(truths) ANY_float8(__builtin_convertvector(truths, int8))
#else
#define ANY_float8 any
#define ANY_double8 any
#endif
#ifdef __AVX512DQ__
#define ANY_float16(truths) (__builtin_ia32_cvtd2mask512(truths) != 0)
#else
#define ANY_float16(truths) ANY_float8((truths).lo | (truths).hi)
#endif
"""
# x is n quarters of a turn plus a remainder. A lane that is large, infinite or NaN is computed by itself.
_FLOAT_QUARTERS = """
static inline float8 turn_remainder_float8(float8 x, int8 *quarters) {
    double8 wide = __builtin_convertvector(x, double8);
    double8 t = wide * 0.6366197723675814 + 6755399441055744.0, n = t - 6755399441055744.0;
    double8 r = wide - n * 1.57079632673412561417e+00;
    r = r - n * 6.07710050650619224932e-11;
    *quarters = __builtin_convertvector(as_long8(t), int8);
    return __builtin_convertvector(r, float8);
}
"""
_TWICE_QUARTERS = """
static inline float16 turn_remainder_float16(float16 x, int16 *quarters) {
    int8 low, high;
    float8 a = turn_remainder_float8(x.lo, &low), b = turn_remainder_float8(x.hi, &high);
    *quarters = (int16)(low, high);
    return (float16)(a, b);
}
"""
_WIDE_QUARTERS = """
static inline double8 turn_remainder_double8(double8 x, long8 *quarters) {
    double8 t = x * 0.6366197723675814 + 6755399441055744.0, n = t - 6755399441055744.0;
    double8 r = x - n * 1.57079632673412561417e+00;
    r = r - n * 6.07710050630396597660e-11;
    r = r - n * 2.02226624871116645580e-21;
    *quarters = as_long8(t);
    return r - n * 8.47842766036889956997e-32;
}
"""
_ANGLES = """
static inline void sine_cosine_$F($F a, $I *quarters, $F *sine, $F *cosine) {
    $F r = turn_remainder_$F(a, quarters), z = r * r;
    *sine = r + r * (z * $sin);
    *cosine = 1 + z * (z * $cos - 0.5$f);
}
#define LARGE_BY_THEMSELVES_$F(y, function, a, x) \\
    $I large_ = as_$I(a) >= $large; \\
    if (ANY_$F(large_)) \\
        for (int lane_ = 0; lane_ < $width; lane_++) \\
            if (large_[lane_]) y[lane_] = function(x[lane_]);
static inline $F sin_$F($F x) {
    $I sign = as_$I(x) & $sign, n;
    $F a = as_$F(as_$I(x) ^ sign), s, c;
    sine_cosine_$F(a, &n, &s, &c);
    $F y = as_$F(as_$I((n & 1) != 0 ? c : s) ^ ((n & 2) << ($bits - 2)) ^ sign);
    LARGE_BY_THEMSELVES_$F(y, sin, a, x)
    return y;
}
static inline $F cos_$F($F x) {
    $I n;
    $F a = as_$F(as_$I(x) & ~$sign), s, c;
    sine_cosine_$F(a, &n, &s, &c);
    $F y = as_$F(as_$I((n & 1) != 0 ? s : c) ^ (((n + 1) & 2) << ($bits - 2)));
    LARGE_BY_THEMSELVES_$F(y, cos, a, x)
    return y;
}
static inline $F tan_$F($F x) {
    $I sign = as_$I(x) & $sign, n;
    $F a = as_$F(as_$I(x) ^ sign), s, c;
    sine_cosine_$F(a, &n, &s, &c);
    $I odd = (n & 1) != 0;
    $F y = as_$F(as_$I((odd ? -c : s) / (odd ? s : c)) ^ sign);
    LARGE_BY_THEMSELVES_$F(y, tan, a, x)
    return y;
}
"""
# Near 1, asin and acos are those of sqrt((1 - |x|) / 2), doubled. atan: a point (b, a) is turned by none, one
# or two eighths of a turn, so that its angle is at most half an eighth.
_INVERSE_ANGLES = """
static inline $F half_asin_$F($F a, $I *near) {
    *near = a > 0.5$f;
    $F z = *near ? (1 - a) * 0.5$f : a * a, s = *near ? sqrt(z) : a;
    return s + s * (z * $asin);
}
static inline $F asin_$F($F x) {
    $I sign = as_$I(x) & $sign, near;
    $F p = half_asin_$F(as_$F(as_$I(x) ^ sign), &near);
    return as_$F(as_$I(near ? $half_pi - (2 * p - $half_pi_low) : p) | sign);
}
static inline $F acos_$F($F x) {
    $I near;
    $F p = half_asin_$F(as_$F(as_$I(x) & ~$sign), &near), beyond = x < 0 ? -p : p;
    $F far = x < 0 ? 2 * ($half_pi - (p - $half_pi_low)) : 2 * p;
    return near ? far : $half_pi - (beyond - $half_pi_low);
}
static inline $F atan_of_$F($F a, $F b) {
    $I far = a > b * 2.41421356237309505$f, middle = a > b * 0.41421356237309505$f;
    $F over = far ? -b : middle ? a - b : a, under = far ? a : middle ? a + b : b == 0 ? ($F)(1) : b;
    $F t = over / under, z = t * t;
    $F base = far ? ($F)($half_pi) : middle ? ($F)($quarter_pi) : ($F)(0);
    $F low = far ? ($F)($half_pi_low) : middle ? ($F)($quarter_pi_low) : ($F)(0);
    return base + (t + (t * (z * $atan) + low));
}
static inline $F atan_$F($F x) {
    $I sign = as_$I(x) & $sign;
    return as_$F(as_$I(atan_of_$F(as_$F(as_$I(x) ^ sign), ($F)(1))) | sign);
}
static inline $F atan2_$F($F y, $F x) {
    $I sign = as_$I(y) & $sign;
    $F a = as_$F(as_$I(y) ^ sign), b = as_$F(as_$I(x) & ~$sign);
    $I huge = (a > $huge) | (b > $huge), both = (a == INFINITY) & (b == INFINITY);
    a = both ? ($F)(1) : huge ? a * 0.25$f : a;
    b = both ? ($F)(1) : huge ? b * 0.25$f : b;
    $F q = atan_of_$F(a, b);
    q = as_$I(x) < 0 ? 2 * $half_pi - (q - 2 * $half_pi_low) : q;
    return as_$F(as_$I(q) | sign);
}
"""
# By log(1 + f) = 2 atanh(s), where s = f / (2 + f): f - f^2 / 2 + s (f^2 / 2 + s^2 P(s^2)).
_WIDE_LOG_REST = """
static inline double8 log_rest(double8 f) {
    double8 s = f / (2 + f), z = s * s, half_square = 0.5 * f * f;
    return s * (half_square + z * $twice_atanh) - half_square;
}
"""
_HYPOT = """
static inline double8 hypot_double8(double8 x, double8 y) {
    double8 a = as_double8(as_long8(x) & ~$sign), b = as_double8(as_long8(y) & ~$sign);
    double8 most = a > b ? a : b, least = a > b ? b : a, ratio = least / (most == 0 ? (double8)(1) : most);
    double8 size = most * sqrt(1 + ratio * ratio);
    return (a == INFINITY) | (b == INFINITY) ? (double8)(INFINITY) : size;
}
"""


_TEMPLATES = {
    "any": _ANY,
    "rest": vector_powers.FLOAT_REST,
    "twice_rest": vector_powers.TWICE_REST,
    "wide_rest": vector_powers.WIDE_REST,
    "divisions": vector_powers.DIVISIONS,
    "quick": _QUICK,
    "error_function": _ERROR_FUNCTION,
    "remainder": _REMAINDER,
    "exponentials": _EXPONENTIALS,
    "wide_exponentials": _WIDE_EXPONENTIALS,
    "log_parts": _LOG_PARTS,
    "log_rest": _WIDE_LOG_REST,
    "logarithms": _LOGARITHMS,
    "quarters": _FLOAT_QUARTERS,
    "twice_quarters": _TWICE_QUARTERS,
    "wide_quarters": _WIDE_QUARTERS,
    "angles": _ANGLES,
    "inverse_angles": _INVERSE_ANGLES,
    "power_ends": vector_powers.POWER_ENDS,
    "power": vector_powers.POWER,
    "float_power": vector_powers.FLOAT_POWER,
    "twice_power": vector_powers.TWICE_POWER,
    "wide_power": vector_powers.WIDE_POWER,
    "pow": vector_powers.POW,
    "hypot": _HYPOT,
}
_TYPES = {
    "float8": _Vectors("float", 8, FLOAT),
    "float16": _Vectors("float", 16, FLOAT),
    "double8": _Vectors("double", 8, DOUBLE),
}
# Families of functions; by type, the templates that they need, with a dot before another type than theirs.
_FAMILIES: Mapping[str, Mapping[str, str]] = {
    "exp tanh": {
        "float8": "quick",
        "float16": "quick",
        "double8": "remainder exponentials wide_exponentials",
    },
    "expm1 sinh cosh": dict.fromkeys(_TYPES, "remainder exponentials"),
    "log log2 log10 log1p asinh acosh atanh": {
        "float8": "log_parts logarithms",
        "float16": "log_parts logarithms",
        "double8": "log_rest log_parts logarithms",
    },
    "sin cos tan": {
        "float8": "any.float8 quarters angles",
        "float16": "any.float8 quarters.float8 twice_quarters angles",
        "double8": "any.float8 wide_quarters angles",
    },
    "asin acos atan atan2": dict.fromkeys(_TYPES, "inverse_angles"),
    "pow": {
        "float8": "power_ends log_parts power float_power pow",
        "float16": "power_ends log_parts power.float8 twice_power pow",
        "double8": "power_ends log_parts wide_power pow",
    },
    "hypot": {"double8": "hypot"},
    "remainder floor_divide": {
        "float8": "any.float8 rest divisions",
        "float16": "any.float8 rest.float8 twice_rest divisions",
        "double8": "any.float8 wide_rest divisions",
    },
    "erf": {"float8": "quick error_function", "float16": "quick error_function"},
}


def _once(template: str, type_: str) -> str:
    """A template for a type, where no other function has brought it."""
    guard = f"HAS_{template}_{type_}".upper()
    return f"#ifndef {guard}\n#define {guard}{_TYPES[type_].text(_TEMPLATES[template])}#endif\n"


def _texts() -> Iterator[tuple[str, str]]:
    for names, types in _FAMILIES.items():
        for type_, templates in types.items():
            parts = (part.partition(".") for part in templates.split())
            text = "".join(_once(template, other or type_) for template, _, other in parts)
            yield from ((f"{name}_{type_}(", text) for name in names.split())


TEXTS: Mapping[str, str] = dict(_texts())  # by the calls that need them
FUNCTIONS: Mapping[str, Sequence[str]] = {  # by type of items: those that are here
    item: [name for names, types in _FAMILIES.items() if f"{item}8" in types for name in names.split()]
    for item in ("float", "double")
}
