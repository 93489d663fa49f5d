// Vectors of 16 floats, and bfloat16 as what they are loaded from and stored to.
//
// They are GCC's, so the code compiles for any CPU; what only newer ones have is used where it is there.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr long LANES = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef Vec UnalignedVec __attribute__((aligned(4)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));
typedef HalfVec UnalignedHalfVec __attribute__((aligned(2)));
typedef uint32_t UIntVec __attribute__((vector_size(64)));

struct bfloat16 {
    uint16_t bits;
};

// What a register of the CPU holds. GCC keeps larger vectors in memory, between one operation and the next.
#if defined(__AVX512F__)
typedef Vec Register;
inline Register everywhere(float x) { return Register{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#elif defined(__AVX__)
typedef float Register __attribute__((vector_size(32)));
inline Register everywhere(float x) { return Register{x, x, x, x, x, x, x, x}; }
#else
typedef float Register __attribute__((vector_size(16)));
inline Register everywhere(float x) { return Register{x, x, x, x}; }
#endif
typedef uint32_t BitsRegister __attribute__((vector_size(sizeof(Register))));
typedef uint16_t HalfRegister __attribute__((vector_size(sizeof(Register) / 2)));
constexpr int REGISTER_LANES = sizeof(Register) / sizeof(float);
typedef Register UnalignedRegister __attribute__((aligned(4)));
inline Register widened(const float* p) { return *reinterpret_cast<const UnalignedRegister*>(p); }
inline void keep(float* p, Register x) { *reinterpret_cast<UnalignedRegister*>(p) = x; }

inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }

inline Vec load(const bfloat16* p) {
    const HalfVec half = *reinterpret_cast<const UnalignedHalfVec*>(p);
    return (Vec)(__builtin_convertvector(half, UIntVec) << 16);
}

inline UIntVec bits_of(Vec x) { return (UIntVec)x; }
#if !defined(__AVX512F__)
inline BitsRegister bits_of(Register x) { return (BitsRegister)x; }
#endif

// Bits whose upper halves are the nearest bfloat16, to even between two, as torch rounds.
template <typename V>
inline auto nearest(V x) {
    const auto bits = bits_of(x);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

inline void store(bfloat16* p, Vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    *reinterpret_cast<UnalignedHalfVec*>(p) = __builtin_convertvector(nearest(x) >> 16, HalfVec);
#endif
}

// As it is once it was stored as bfloat16.
template <typename T, typename V>
inline V rounded(V x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else {
#if defined(__AVX512BF16__)
        return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
#else
        return (V)(nearest(x) & 0xffff0000u);
#endif
    }
}

// A register of floats from what is loaded as such.
#if defined(__AVX512F__)
inline Register widened(const bfloat16* p) { return load(p); }
#else
inline Register widened(const bfloat16* p) {
    HalfRegister halves;
    std::memcpy(&halves, p, sizeof halves);
    return (Register)(__builtin_convertvector(halves, BitsRegister) << 16);
}

inline void store(bfloat16* p, Register x) {
    const HalfRegister halves = __builtin_convertvector(nearest(x) >> 16, HalfRegister);
    std::memcpy(p, &halves, sizeof halves);
}
#endif

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <typename T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
    return x;
}
template <>
inline bfloat16 narrow<bfloat16>(float x) {
    bfloat16 out[LANES];
    store(out, splat(x));
    return out[0];
}

#if defined(__AVX512F__)
inline float sum(Vec x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps((__m512)x); }
#else
inline float sum(Vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

inline float largest(Vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = std::max(x[i], x[i + half]);
    return x[0];
}
#endif

#if defined(__AVX512F__)
inline Vec maximum(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline Vec minimum(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
#else
template <typename V>
inline V maximum(V a, V b) {
    return a > b ? a : b;
}
template <typename V>
inline V minimum(V a, V b) {
    return a < b ? a : b;
}
#endif

// exp(x) to 2 units in the last place for x <= 88; 0 below -87. Cephes' way: 2^n times a polynomial.
inline Vec exponential(Vec x) {
    const Vec clamped = minimum(maximum(x, splat(-87.3f)), splat(88.3f));
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec shifted = clamped * 1.44269504f + magic;
    const Vec n = shifted - magic;
    const Vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Vec scale = (Vec)(((IntVec)shifted + (127 - 0x4b400000)) << 23);
    return x < splat(-87.3f) ? Vec{} : p * scale;
}

// 2^x, to 3e-6 by a polynomial of 4 terms that is least wrong where it is most, and to 2e-7 by one of 6. 0 for what is
// far too small to matter. Without AVX-512, x may be 126 at most. FINITE: no x is infinite, which saves an instruction.
template <int TERMS, bool FINITE = false, typename V>
inline V power_of_two(V x) {
    static_assert(TERMS == 4 || TERMS == 6);
#if defined(__AVX512F__)
    const Vec bounded = FINITE ? x : maximum(x, splat(-200.0f));  // whose power is 0
    const Vec n = (Vec)_mm512_roundscale_ps((__m512)bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const V bounded = maximum(x, V{} - 126.0f);
    const V n = (bounded + 12582912.0f) - 12582912.0f;
#endif
    const V r = bounded - n;
    V p = V{} + (TERMS == 4 ? 9.5828521e-3f : 1.5403530e-4f);
    if (TERMS == 4) {
        p = p * r + 5.5906430e-2f;
        p = p * r + 2.4024099e-1f;
        p = p * r + 6.9312419e-1f;
    } else {
        p = p * r + 1.3333558e-3f;
        p = p * r + 9.6181291e-3f;
        p = p * r + 5.5504109e-2f;
        p = p * r + 2.4022651e-1f;
        p = p * r + 6.9314718e-1f;
    }
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    typedef decltype(x < x) Integers;
    const V scale = (V)((__builtin_convertvector(n, Integers) + 127) << 23);
    return x < V{} - 126.0f ? V{} : p * scale;
#endif
}

inline Vec hyperbolic_tangent(Vec x) {
    return 1.0f - 2.0f / (exponential(minimum(x * 2.0f, splat(60.0f))) + 1.0f);
}

}  // namespace
