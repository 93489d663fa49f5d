// Paged attention, and what fills its pool. Compiled for one type, COMPUTED, of queries, keys and values.

#include <cstdlib>

#include <omp.h>

#include "microkernel.h"

namespace {

constexpr long TILE_KEYS = 256;  // keys of which scores are kept at a time
constexpr float HIDDEN = -1e30f; // what must not be seen has this score: finite, so that all have a power of 2

// 16 rows of 16 four-byte words (`from_stride` words apart) to 16 columns (`to_stride` words apart).
inline void transpose16(const uint32_t* from, long from_stride, uint32_t* to, long to_stride) {
#if defined(__AVX512F__)
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
        _mm512_storeu_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_storeu_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
    }
#else
    // By blocks of 4 x 4, whose rows fit registers of any CPU.
    typedef uint32_t Four __attribute__((vector_size(16)));
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 16; j += 4) {
            Four r[4];
            for (int k = 0; k < 4; k++) std::memcpy(&r[k], from + (i + k) * from_stride + j, sizeof(Four));
            const Four low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
            const Four a = __builtin_shuffle(r[0], r[1], low), b = __builtin_shuffle(r[2], r[3], low);
            const Four c = __builtin_shuffle(r[0], r[1], high), d = __builtin_shuffle(r[2], r[3], high);
            r[0] = __builtin_shuffle(a, b, first);
            r[1] = __builtin_shuffle(a, b, second);
            r[2] = __builtin_shuffle(c, d, first);
            r[3] = __builtin_shuffle(c, d, second);
            for (int k = 0; k < 4; k++) std::memcpy(to + (j + k) * to_stride + i, &r[k], sizeof(Four));
        }
#endif
}

// The shape of the pool [blocks, kv_heads, layers, 2, block_tokens, head_dim], and of one call.
struct AttentionShape {
    int64_t heads, kv_heads, head_dim, block_tokens, layers, layer;
    int64_t query_head_stride, query_token_stride;  // in elements; the last dimension is contiguous
    int64_t window;                                 // positions a token sees, its own included; 0: all
    float scale, softcap;                           // softcap 0: none
};

// Tokens [token, token + count) of the flattened batch are positions [position, position + count) of the sequence
// whose block table begins at tables[table].
struct AttentionItem {
    int64_t token, count, position, table;
};

inline long round_up(long x, long unit) { return (x + unit - 1) / unit * unit; }

inline long row_elements(const AttentionShape& s) {  // of one head and layer, K or V
    return s.block_tokens * s.head_dim;
}

inline long row_of(const AttentionShape& s, long block, long kv_head) {  // that of the keys; the values' is the next
    return ((block * s.kv_heads + kv_head) * s.layers + s.layer) * 2 * row_elements(s);
}

// Memory of one thread, and the work on one item and KV head.
template <typename T>
class Attention {
    typedef typename Operand<T>::Element E;
    static constexpr long PAIR = Operand<T>::PAIR;

   public:
    Attention(const AttentionShape& shape, long max_rows)
        : s_(shape),
          group_(shape.heads / shape.kv_heads),
          depth_(round_up(shape.head_dim, PANEL)),
          to_value_(row_elements(shape)) {
        const long words = max_rows * depth_ * 2 + 2 * TILE_KEYS * depth_ + 2 * ROWS * TILE_KEYS + 4 * max_rows +
                           LANES * depth_ + 16 * LANES;
        memory_ = static_cast<float*>(std::aligned_alloc(64, round_up(words * 4, 64)));
        float* at = memory_;
        const auto take = [&at](long count) {
            float* taken = at;
            at += round_up(count, LANES);
            return taken;
        };
        outputs_ = take(max_rows * depth_);
        queries_ = reinterpret_cast<E*>(take(max_rows * depth_));
        keys_ = reinterpret_cast<E*>(take(TILE_KEYS * depth_));
        values_ = reinterpret_cast<E*>(take(TILE_KEYS * depth_));
        scores_ = take(ROWS * TILE_KEYS);
        weights_ = reinterpret_cast<E*>(take(ROWS * TILE_KEYS));
        most_ = take(max_rows + LANES);  // read by vectors from any row on
        total_ = take(max_rows + LANES);
        positions_ = reinterpret_cast<int64_t*>(take(2 * max_rows));
        rows_ = reinterpret_cast<E*>(take(LANES * depth_));
    }
    ~Attention() { std::free(memory_); }
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;

    void run(const AttentionItem& item, long kv_head, const T* query, const T* pool, const int32_t* tables, T* out) {
        const long num_rows = item.count * group_, end = item.position + item.count;
        read_queries(item, kv_head, query);
        std::fill(outputs_, outputs_ + num_rows * depth_, 0.0f);
        std::fill(most_, most_ + num_rows, HIDDEN);
        std::fill(total_, total_ + num_rows, 0.0f);
        const long lowest = s_.window ? std::max(0L, item.position + 1 - s_.window) : 0;
        for (long first = lowest / TILE_KEYS * TILE_KEYS; first < end; first += TILE_KEYS) {
            const long count = std::min(TILE_KEYS, end - first);
            pack(pool, tables + item.table, kv_head, first, count);
            for_row_groups(num_rows, [&](long r, int rows, long, long) { attend(r, rows, first); });
        }
        write(item, kv_head, num_rows, out);
    }

   private:
    void read_queries(const AttentionItem& item, long kv_head, const T* query) {
        for (long t = 0, row = 0; t < item.count; t++)
            for (long g = 0; g < group_; g++, row++) {
                const long head = kv_head * group_ + g;
                const T* from = query + (item.token + t) * s_.query_token_stride + head * s_.query_head_stride;
                widen_row(from, queries_ + row * depth_);
                positions_[row] = item.position + t;
            }
    }

    const T* key_row(const T* pool, const int32_t* table, long kv_head, long position) const {
        return pool + row_of(s_, table[position / s_.block_tokens], kv_head) + position % s_.block_tokens * s_.head_dim;
    }

    // A vector as operands, zeros up to the panel's end.
    void widen_row(const T* from, E* to) const {
        if constexpr (sizeof(T) == sizeof(E)) {
            std::memcpy(to, from, s_.head_dim * sizeof(E));
        } else {
            long d = 0;
            for (; d + REGISTER_LANES <= s_.head_dim; d += REGISTER_LANES) keep(to + d, widened(from + d));
            for (; d < s_.head_dim; d++) to[d] = widen(from[d]);
        }
        std::memset(static_cast<void*>(to + s_.head_dim), 0, (depth_ - s_.head_dim) * sizeof(E));
    }

    // Keys [first, first + count) to strips of keys, values to strips of dimensions; zeros after them.
    void pack(const T* pool, const int32_t* table, long kv_head, long first, long count) {
        const long words = depth_ / PAIR;
        for (long k0 = 0; k0 < round_up(count, PANEL); k0 += LANES) {
            const long keys = std::clamp(count - k0, 0L, LANES);
            if (k0 + LANES < count) fetch(key_row(pool, table, kv_head, first + k0 + LANES));
            long stride;
            const E* rows = rows_of(pool, table, kv_head, first + k0, keys, 0, stride);
            uint32_t* strip = reinterpret_cast<uint32_t*>(keys_) + k0 / STRIP * STRIP * words + k0 % STRIP;
            for (long w = 0; w < words; w += LANES)
                transpose16(reinterpret_cast<const uint32_t*>(rows) + w, stride / PAIR, strip + w * STRIP, STRIP);
            rows = rows_of(pool, table, kv_head, first + k0, keys, to_value_, stride);
            for (long d = 0; d < depth_; d += STRIP)
                pack_values(rows + d, stride, values_ + d * TILE_KEYS + k0 * STRIP);
        }
    }

    // 16 rows of keys (or, `to_value` further on, values) and how far apart they are: where they lie in the pool if
    // they lie there as operands, else copied. Zeros after `count`.
    const E* rows_of(const T* pool, const int32_t* table, long kv_head, long first, long count, long to_value,
                     long& stride) {
        if constexpr (sizeof(T) == sizeof(E)) {
            if (count == LANES && s_.head_dim == depth_ && first % s_.block_tokens + LANES <= s_.block_tokens) {
                stride = s_.head_dim;
                return reinterpret_cast<const E*>(key_row(pool, table, kv_head, first) + to_value);
            }
        }
        stride = depth_;
        if (count < LANES) std::memset(static_cast<void*>(rows_), 0, LANES * depth_ * sizeof(E));
        for (long k = 0; k < count; k++)
            widen_row(key_row(pool, table, kv_head, first + k) + to_value, rows_ + k * depth_);
        return rows_;
    }

    // The keys and values of a block come from memory one after the other: ask for the next while this is used.
    void fetch(const T* keys) const {
        const long bytes = std::min(s_.block_tokens, LANES) * s_.head_dim * sizeof(T);
        const char* at = reinterpret_cast<const char*>(keys);
        const char* values = reinterpret_cast<const char*>(keys + to_value_);
        for (long i = 0; i < bytes; i += 64) {
            __builtin_prefetch(at + i, 0, 2);
            __builtin_prefetch(values + i, 0, 2);
        }
    }

    // 16 rows of values to one strip.
    void pack_values(const E* from, long stride, E* to) const {
        for (long k = 0; k < LANES; k += PAIR, to += STRIP * PAIR, from += PAIR * stride) {
            if constexpr (PAIR == 1) {
                std::memcpy(to, from, STRIP * sizeof(E));
            } else {
#if defined(__AVX512BF16__)
                const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                                     38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
                const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
                for (long d = 0; d < STRIP; d += 2 * LANES) {
                    const __m512i a = _mm512_loadu_si512(from + d), b = _mm512_loadu_si512(from + stride + d);
                    _mm512_storeu_si512(to + d * 2, _mm512_permutex2var_epi16(a, low, b));
                    _mm512_storeu_si512(to + d * 2 + 2 * LANES, _mm512_permutex2var_epi16(a, high, b));
                }
#endif
            }
        }
    }

    // One group of rows over the packed tile of keys that starts at position `first`.
    void attend(long r, int rows, long first) {
        const long visible = std::min(TILE_KEYS, positions_[r + rows - 1] + 1 - first);
        if (visible <= 0) return;
        const long span = round_up(visible, LANES);
        score(r, rows, span);
        if (s_.softcap > 0) bend(rows, span);
        alignas(64) float fade[LANES];
        with_rows(rows, [&]<int M>() { soften<M>(r, first, span, fade); });
        add_values(r, rows, span, fade);
    }

#if defined(__AVX512F__)

    void score(long r, int rows, long span) {
        for (long k = 0; k < span; k += PANEL)
            tile_of<E, PAIR>(
                rows, queries_ + r * depth_, depth_, keys_ + k * depth_, depth_, nullptr, 0,
                [](int, int) { return Vec{}; },
                [&](int i, const Vec* sums) {
                    for (long j = 0; j < VECTORS; j++) store(scores_ + i * TILE_KEYS + k + j * LANES, sums[j]);
                });
    }

    void add_values(long r, int rows, long span, const float* fade) {
        for (long d = 0; d < depth_; d += PANEL)
            tile_of<E, PAIR>(
                rows, weights_, TILE_KEYS, values_ + d * TILE_KEYS, span, nullptr, 0,
                [&](int i, int j) { return load(outputs_ + (r + i) * depth_ + d + j * LANES) * fade[i]; },
                [&](int i, const Vec* sums) {
                    for (long j = 0; j < VECTORS; j++)
                        store(outputs_ + (r + i) * depth_ + d + j * LANES, sums[j]);
                });
    }

#else

    void score(long r, int rows, long span) {
        with_rows(rows, [&]<int M>() {
            for (long k = 0; k < span; k += STRIP)
                multiply_strip<M, false>(queries_ + r * depth_, depth_, keys_ + k * depth_, depth_, scores_ + k, TILE_KEYS);
        });
    }

    void add_values(long r, int rows, long span, const float* fade) {
        float* outputs = outputs_ + r * depth_;
        for (long i = 0; i < rows; i++)
            for (long d = i * depth_; d < (i + 1) * depth_; d += REGISTER_LANES)
                keep(outputs + d, widened(outputs + d) * fade[i]);
        with_rows(rows, [&]<int M>() {
            for (long d = 0; d < depth_; d += STRIP)
                multiply_strip<M, true>(weights_, TILE_KEYS, values_ + d * TILE_KEYS, span, outputs + d, depth_);
        });
    }

#endif

    // Scores scaled and capped: softcap * tanh(scale * score / softcap).
    void bend(int rows, long span) {
        for (long i = 0; i < rows; i++)
            for (long k = i * TILE_KEYS; k < i * TILE_KEYS + span; k += LANES)
                store(scores_ + k, hyperbolic_tangent(load(scores_ + k) * (s_.scale / s_.softcap)) * s_.softcap);
    }

    // Scores of the group's M rows to weights, e^(scale * (score - largest so far)), and what each row's earlier outputs
    // fade by. With large registers rows go side by side: one alone would wait for its largest score, then for its sum.
    template <int M>
    ALWAYS_INLINE void soften(long r, long first, long span, float* fade) {
        constexpr float log2_e = 1.44269504f;
        constexpr int PARTS = LANES / REGISTER_LANES, SIDE = PARTS == 1 ? M : 1;
        const float scale = (s_.softcap > 0 ? 1.0f : s_.scale) * log2_e;
        alignas(64) float now[LANES] = {}, added[LANES] = {};
        const auto row_of = [&](int i, long k, int part) { return i * TILE_KEYS + k + part * REGISTER_LANES; };
        for (int i0 = 0; i0 < M; i0 += SIDE) {
            Register most[SIDE][PARTS];
#pragma GCC unroll 6
            for (int i = 0; i < SIDE; i++) {
                hide(positions_[r + i0 + i] - first, span, scores_ + (i0 + i) * TILE_KEYS);
#pragma GCC unroll 4
                for (int p = 0; p < PARTS; p++) most[i][p] = everywhere(most_[r + i0 + i]);
            }
            for (long k = 0; k < span; k += LANES)
#pragma GCC unroll 6
                for (int i = 0; i < SIDE; i++)
#pragma GCC unroll 4
                    for (int p = 0; p < PARTS; p++)
                        most[i][p] = maximum(most[i][p], widened(scores_ + row_of(i0 + i, k, p)));
#pragma GCC unroll 6
            for (int i = 0; i < SIDE; i++) now[i0 + i] = largest(whole(most[i]));
        }
        // A row that sees nothing up to here: nothing is added to it, as its weights are all 0.
        const Vec base = maximum(load(now), splat(HIDDEN / 2)) * scale;
        store(fade, power_of_two<6>(load(most_ + r) * scale - base));
        std::memcpy(most_ + r, now, M * sizeof(float));
        store(now, base);
        for (int i0 = 0; i0 < M; i0 += SIDE) {
            Register sums[SIDE][PARTS] = {};
            for (long k = 0; k < span; k += LANES)
#pragma GCC unroll 6
                for (int i = 0; i < SIDE; i++)
#pragma GCC unroll 4
                    for (int p = 0; p < PARTS; p++) {
                        const long at = row_of(i0 + i, k, p);
                        const Register exponent = widened(scores_ + at) * scale - now[i0 + i];
                        const Register weight = power_of_two<sizeof(T) == 4 ? 6 : 4, true>(exponent);
                        sums[i][p] += weight;
                        keep_weight(at, weight);
                    }
#pragma GCC unroll 6
            for (int i = 0; i < SIDE; i++) added[i0 + i] = sum(whole(sums[i]));
        }
        store(added, load(total_ + r) * load(fade) + load(added));
        std::memcpy(total_ + r, added, M * sizeof(float));
    }

    static Vec whole(const Register* parts) {
        Vec all;
        std::memcpy(&all, parts, sizeof all);
        return all;
    }

    void keep_weight(long at, Register weight) {
        if constexpr (sizeof(E) == sizeof(float))
            keep(weights_ + at, weight);
        else
            store(weights_ + at, weight);
    }

    // HIDDEN for the scores of what a row must not see; its own key is number `own` of the tile.
    void hide(long own, long span, float* scores) const {
        const long end = std::clamp(own + 1, 0L, span);
        const long begin = s_.window ? std::clamp(own + 1 - s_.window, 0L, end) : 0;
        if (begin == 0 && end == span) return;
        std::fill(scores, scores + begin, HIDDEN);
        std::fill(scores + end, scores + span, HIDDEN);
    }

    void write(const AttentionItem& item, long kv_head, long num_rows, T* out) const {
        for (long row = 0; row < num_rows; row++) {
            const float share = 1.0f / total_[row];
            const long head = kv_head * group_ + row % group_;
            T* to = out + ((item.token + row / group_) * s_.heads + head) * s_.head_dim;
            const float* from = outputs_ + row * depth_;
            long d = 0;
            for (; d + LANES <= s_.head_dim; d += LANES) store(to + d, load(from + d) * share);
            for (; d < s_.head_dim; d++) to[d] = narrow<T>(from[d] * share);
        }
    }

    const AttentionShape s_;
    const long group_, depth_, to_value_;
    float *memory_, *outputs_, *scores_, *most_, *total_;
    int64_t* positions_;  // of rows
    E *queries_, *keys_, *values_, *weights_, *rows_;
};

template <typename T>
void attention(const AttentionShape* shape, const T* query, const T* pool, const int32_t* tables,
               const AttentionItem* items, long num_items, long max_rows, T* out) {
#pragma omp parallel
    {
        Attention<T> worker(*shape, max_rows);
#pragma omp for schedule(dynamic)
        for (long i = 0; i < num_items * shape->kv_heads; i++)
            worker.run(items[i / shape->kv_heads], i % shape->kv_heads, query, pool, tables, out);
    }
}

// keys and values [tokens, kv_heads, head_dim], strided, to their slots: slots[t] = block * block_tokens + offset.
template <typename T>
void write_kv(const AttentionShape& s, T* pool, const int64_t* slots, long tokens, const T* keys, long key_head_stride,
              long key_token_stride, const T* values, long value_head_stride, long value_token_stride) {
#pragma omp parallel for schedule(static) if (tokens > 64)
    for (long t = 0; t < tokens; t++)
        for (long head = 0; head < s.kv_heads; head++) {
            const long block = slots[t] / s.block_tokens, offset = slots[t] % s.block_tokens;
            T* row = pool + row_of(s, block, head) + offset * s.head_dim;
            std::memcpy(row, keys + t * key_token_stride + head * key_head_stride, s.head_dim * sizeof(T));
            std::memcpy(row + row_elements(s), values + t * value_token_stride + head * value_head_stride,
                        s.head_dim * sizeof(T));
        }
}

}  // namespace

extern "C" {

void tandem_attention(const AttentionShape* shape, const COMPUTED* query, const COMPUTED* pool, const int32_t* tables,
                      const AttentionItem* items, long num_items, long max_rows, COMPUTED* out) {
    attention(shape, query, pool, tables, items, num_items, max_rows, out);
}

void tandem_write_kv(const AttentionShape* shape, COMPUTED* pool, const int64_t* slots, long tokens, const COMPUTED* keys,
                     long key_head_stride, long key_token_stride, const COMPUTED* values, long value_head_stride,
                     long value_token_stride) {
    write_kv(*shape, pool, slots, tokens, keys, key_head_stride, key_token_stride, values, value_head_stride,
             value_token_stride);
}
}
