// Fingerprints of blocks as fast as memory gives the words. The definition stands in fingerprint.py.

#include "fold.h"

using namespace tandem;

// out[i * heads + h] = zero + fold of part h of block ids[i]; a block has heads * words words.
extern "C" void tandem_fingerprint(const uint64_t* pool, const int64_t* ids, long count, long heads, long words,
                                   const uint64_t* page, long page_words, const uint64_t* chunks, uint64_t zero,
                                   uint64_t* out) {
    for (long i = 0; i < count; i++)
        for (long head = 0; head < heads; head++) {
            const uint64_t* span = pool + (ids[i] * heads + head) * words;
            uint64_t total = zero;
            for (long w = 0; w < words; w += page_words) {
                const long rest = words - w < page_words ? words - w : page_words;
                total += chunks[w / page_words] * fold(span + w, page, rest, Leave{});
            }
            out[i * heads + head] = total;
        }
}
