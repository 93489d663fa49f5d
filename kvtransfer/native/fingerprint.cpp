// Sums of words times multipliers, as fast as memory gives the words. The definition stands in fingerprint.py.

#include <cstdint>

namespace {

typedef uint64_t Words __attribute__((vector_size(64)));
typedef Words UnalignedWords __attribute__((aligned(8)));

constexpr long LANES = 8;
constexpr long UNROLL = 4;  // independent sums, or each product would wait for the last

inline Words load(const uint64_t* p) { return *reinterpret_cast<const UnalignedWords*>(p); }

inline Words mixed(Words words) { return words ^ (words >> 32); }

uint64_t fold(const uint64_t* words, const uint64_t* multipliers, long count) {
    Words sums[UNROLL] = {};
    long i = 0;
    for (; i + LANES * UNROLL <= count; i += LANES * UNROLL)
        for (long j = 0; j < UNROLL; j++) {
            const long at = i + j * LANES;
            __builtin_prefetch(words + at + 64 * LANES);
            sums[j] += mixed(load(words + at)) * load(multipliers + at);
        }
    Words all = {};
    for (long j = 0; j < UNROLL; j++) all += sums[j];
    uint64_t total = 0;
    for (long lane = 0; lane < LANES; lane++) total += all[lane];
    for (; i < count; i++) total += (words[i] ^ (words[i] >> 32)) * multipliers[i];
    return total;
}

}  // namespace

// out[i * heads + h] = zero + fold of part h of block ids[i]; a block has heads * words words. The multiplier of word w
// is page[w % page_words] * chunks[w / page_words].
extern "C" void tandem_fingerprint(const uint64_t* pool, const int64_t* ids, long count, long heads, long words,
                                   const uint64_t* page, long page_words, const uint64_t* chunks, uint64_t zero,
                                   uint64_t* out) {
    for (long i = 0; i < count; i++)
        for (long head = 0; head < heads; head++) {
            const uint64_t* span = pool + (ids[i] * heads + head) * words;
            uint64_t total = zero;
            for (long w = 0; w < words; w += page_words) {
                const long rest = words - w < page_words ? words - w : page_words;
                total += chunks[w / page_words] * fold(span + w, page, rest);
            }
            out[i * heads + head] = total;
        }
}
