// One part of a fingerprint: words times multipliers. The definition stands in fingerprint.py.

#pragma once

#include <cstdint>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace tandem {

typedef uint64_t Words __attribute__((vector_size(64)));
typedef Words UnalignedWords __attribute__((aligned(8)));

constexpr long LANES = 8;
constexpr long UNROLL = 4;  // independent sums, or each product would wait for the last

// How spans of `words` words are folded. The multiplier of word w is page[w % page_words] * chunks[w / page_words].
struct Folding {
    long words;
    const uint64_t* page;
    long page_words;
    const uint64_t* chunks;
    uint64_t zero;
};

// What is done with words on the way to their sum.
struct Leave {
    static constexpr bool AHEAD = true;  // they come from memory
    void operator()(long, const Words&) const {}
    void operator()(long, uint64_t) const {}
};

// Into memory that is 64-byte aligned and will not be read soon: past the cache, which would first fetch what is to be
// overwritten.
struct Stream {
    static constexpr bool AHEAD = false;  // from the cache; where they are mapped memory, it changed nothing
    uint64_t* to;
    void operator()(long at, const Words& words) const {
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), reinterpret_cast<const __m512i&>(words));
#elif defined(__AVX__)
        for (long half = 0; half < 2; half++)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at) + half,
                                reinterpret_cast<const __m256i*>(&words)[half]);
#else
        *reinterpret_cast<Words*>(to + at) = words;
#endif
    }
    void operator()(long at, uint64_t word) const { to[at] = word; }
};

// Into memory of any alignment.
struct Store {
    static constexpr bool AHEAD = false;
    uint64_t* to;
    void operator()(long at, const Words& words) const { *reinterpret_cast<UnalignedWords*>(to + at) = words; }
    void operator()(long at, uint64_t word) const { to[at] = word; }
};

inline Words load(const uint64_t* p) { return *reinterpret_cast<const UnalignedWords*>(p); }

template <class Put>
inline uint64_t fold(const uint64_t* words, const uint64_t* multipliers, long count, const Put& put) {
    Words sums[UNROLL] = {};
    long i = 0;
    for (; i + LANES * UNROLL <= count; i += LANES * UNROLL)
        for (long j = 0; j < UNROLL; j++) {
            const long at = i + j * LANES;
            if constexpr (Put::AHEAD) __builtin_prefetch(words + at + 64 * LANES);
            const Words loaded = load(words + at);
            put(at, loaded);
            sums[j] += (loaded ^ (loaded >> 32)) * load(multipliers + at);
        }
    Words all = {};
    for (long j = 0; j < UNROLL; j++) all += sums[j];
    uint64_t total = 0;
    for (long lane = 0; lane < LANES; lane++) total += all[lane];
    for (; i < count; i++) {
        const uint64_t word = words[i];
        put(i, word);
        total += (word ^ (word >> 32)) * multipliers[i];
    }
    return total;
}

}  // namespace tandem
