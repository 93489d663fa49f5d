// Linear layers over bfloat16 weights.

#include "linear.h"

extern "C" {

// Bytes that `tandem_pack` writes.
long tandem_packed_bytes(long n, long k) { return panels(n) * paired(k) * PANEL * 2 + 4096; }

// Weights [n, k] to panels, as column `shift + (c / group) * stride + c % group` for each row c: with group = n a
// plain matrix, with group 32 one half of a gated pair.
void tandem_pack(const bfloat16* weights, long n, long k, bfloat16* packed, long group, long stride, long shift) {
    const long panel_size = paired(k) * PANEL;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < n; row++) {
        const long column = shift + row / group * stride + row % group;
        bfloat16* to = packed + column / PANEL * panel_size + column % PANEL * PAIR;
        const bfloat16* from = weights + row * k;
        for (long i = 0; i < k; i++) to[place(i)] = from[i];
    }
}

// out[m, n] = x[m, k] @ weights.T (+ bias), or out += that. Strides are in elements.
void tandem_linear(const bfloat16* x, long x_stride, long m, const bfloat16* packed, long n, long k,
                   const bfloat16* bias, bfloat16* out, long out_stride, bool adds) {
    multiply_packed(x, x_stride, m, packed, n, k, Plain{out, out_stride, bias, n, adds});
}

// out[m, n] = silu(x @ gate.T) * (x @ up.T), both [n, k]; n must be a multiple of 32.
void tandem_gated(const bfloat16* x, long x_stride, long m, const bfloat16* packed, long n, long k, bfloat16* out,
                  long out_stride) {
    multiply_packed(x, x_stride, m, packed, 2 * n, k, Gated{out, out_stride});
}

// out[count, k] = rows `ids` of packed weights [n, k]: an embedding that shares the output layer's memory.
void tandem_embed(const int64_t* ids, long count, const bfloat16* packed, long k, bfloat16* out) {
    const long panel_size = paired(k) * PANEL;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < count; t++) {
        const bfloat16* from = packed + ids[t] / PANEL * panel_size + ids[t] % PANEL * PAIR;
        for (long i = 0; i < k; i++) out[t * k + i] = from[place(i)];
    }
}
}
