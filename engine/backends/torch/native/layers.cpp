// What is computed between linear layers and attention, and where threads compute.

#include <omp.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include "vectors.h"

namespace {

// weight * normalised, rounded between the two as transformers' Llama-like norms do.
template <typename T>
void rms_norm(const T* x, long rows, long n, const T* weight, float epsilon, T* out) {
#pragma omp parallel for schedule(static) if (rows > 16)
    for (long r = 0; r < rows; r++) {
        constexpr long SUMS = 4;
        const T* from = x + r * n;
        T* to = out + r * n;
        Vec squares[SUMS]{};  // several, or each addition would wait for the one before
        long i = 0;
        for (; i + SUMS * LANES <= n; i += SUMS * LANES)
            for (long j = 0; j < SUMS; j++) {
                const Vec value = load(from + i + j * LANES);
                squares[j] += value * value;
            }
        for (; i + LANES <= n; i += LANES) squares[0] += load(from + i) * load(from + i);
        float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
        for (; i < n; i++) total += widen(from[i]) * widen(from[i]);
        const float scale = 1.0f / std::sqrt(total / n + epsilon);
        for (i = 0; i + LANES <= n; i += LANES) store(to + i, rounded<T>(load(from + i) * scale) * load(weight + i));
        for (; i < n; i++) to[i] = narrow<T>(widen(narrow<T>(widen(from[i]) * scale)) * widen(weight[i]));
    }
}

// Rotate heads [tokens, heads, head_dim] (strided) in place: the halves of a head are the two parts of `head_dim / 2`
// complex numbers. cos and sin are [tokens, head_dim].
template <typename T>
void rotate(T* x, long heads, long head_stride, long token_stride, const T* cos, const T* sin, long tokens,
            long head_dim) {
    const long half = head_dim / 2;
#pragma omp parallel for schedule(static) if (tokens > 16)
    for (long t = 0; t < tokens; t++)
        for (long head = 0; head < heads; head++) {
            T *low = x + t * token_stride + head * head_stride, *high = low + half;
            const T *c = cos + t * head_dim, *s = sin + t * head_dim;
            long i = 0;
            for (; i + LANES <= half; i += LANES) {
                const Vec a = load(low + i), b = load(high + i);
                store(low + i, a * load(c + i) - b * load(s + i));
                store(high + i, b * load(c + half + i) + a * load(s + half + i));
            }
            for (; i < half; i++) {
                const float a = widen(low[i]), b = widen(high[i]);
                low[i] = narrow<T>(a * widen(c[i]) - b * widen(s[i]));
                high[i] = narrow<T>(b * widen(c[half + i]) + a * widen(s[half + i]));
            }
        }
}

// The index of each row's first largest element; that of its first NaN where it has one, as torch does.
template <typename T>
void argmax(const T* x, long rows, long n, int64_t* out) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const T* from = x + r * n;
        // A maximum drops NaN. The sum of x - x is 0 for numbers, and NaN where any element is NaN or infinite.
        Vec most = splat(-INFINITY), odd = splat(0.0f);
        long i = 0;
        for (; i + LANES <= n; i += LANES) {
            const Vec x = load(from + i);
            most = maximum(most, x);
            odd = odd + (x - x);
        }
        float best = largest(most), strange = sum(odd);
        for (; i < n; i++) {
            const float x = widen(from[i]);
            best = std::max(best, x);
            strange += x - x;
        }
        i = 0;
        if (strange != 0.0f)  // true for NaN
            while (i < n && !std::isnan(widen(from[i]))) i++;
        if (strange == 0.0f || i == n)
            for (i = 0; i < n - 1 && !(widen(from[i]) >= best); i++) {
            }
        out[r] = i;
    }
}

}  // namespace

extern "C" {

// Thread i of the calling thread's team to cores[i]; a core that this process may not use is ignored.
void tandem_bind(const int* cores, int count) {
#if defined(__linux__)
#pragma omp parallel num_threads(count)
    {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cores[omp_get_thread_num()], &own);
        sched_setaffinity(0, sizeof own, &own);
    }
#else
    (void)cores, (void)count;
#endif
}

#define TANDEM_FOR_TYPE(T, name)                                                                                       \
    void tandem_rms_norm_##name(const T* x, long rows, long n, const T* weight, float epsilon, T* out) {               \
        rms_norm(x, rows, n, weight, epsilon, out);                                                                    \
    }                                                                                                                  \
    void tandem_rotate_##name(T* x, long heads, long head_stride, long token_stride, const T* cos, const T* sin,       \
                              long tokens, long head_dim) {                                                            \
        rotate(x, heads, head_stride, token_stride, cos, sin, tokens, head_dim);                                       \
    }                                                                                                                  \
    void tandem_argmax_##name(const T* x, long rows, long n, int64_t* out) { argmax(x, rows, n, out); }

TANDEM_FOR_TYPE(float, float32)
TANDEM_FOR_TYPE(bfloat16, bfloat16)
}
