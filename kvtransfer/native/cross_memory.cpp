// Reads another process's memory, and fingerprints what passes.
//
// Memory that is mapped here is read as one's own is. Any other the kernel copies, by its cross-memory attach, page by
// page, which no CPU prefetches across. So it copies into a small buffer that stays in this core's cache; from there
// words go to where they belong and into their sums.

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "fold.h"

using namespace tandem;

namespace {

constexpr long LEAST_BYTES = 128 << 10, MOST_BYTES = 1 << 20;  // of a buffer
constexpr int MAX_PIECES = 512;  // of one call; the kernel takes 1,024

// Half of what the core has for itself: the other half is for the words' way out.
long buffer_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
    static const long half = sysconf(_SC_LEVEL2_CACHE_SIZE) / 2;  // 0 where it is not known
    return std::clamp(half & -4096, LEAST_BYTES, MOST_BYTES);
#else
    return LEAST_BYTES;
#endif
}

// Of a thread that reads.
class Buffer {
  public:
    Buffer() : bytes(static_cast<char*>(std::aligned_alloc(64, buffer_bytes()))) {}
    ~Buffer() { std::free(bytes); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    char* const bytes;
};

struct Span {
    char* to;
    const char* at;
    long length;
};

// Takes the words of one span after the other, in pieces of whatever length, and writes their fingerprints.
class Folder {
  public:
    Folder(const Folding& folding, uint64_t* out) : folding_(folding), total_(folding.zero), out_(out) {}

    void take(const char* from, char* into, long bytes) {
        const uint64_t* words = reinterpret_cast<const uint64_t*>(from);
        uint64_t* to = reinterpret_cast<uint64_t*>(into);
        long count = bytes / static_cast<long>(sizeof(uint64_t));
        while (count) {
            const long in_page = word_ % folding_.page_words;
            const long n = std::min({count, folding_.page_words - in_page, folding_.words - word_});
            const uint64_t* multipliers = folding_.page + in_page;
            const bool aligned = reinterpret_cast<uintptr_t>(to) % sizeof(Words) == 0;
            const uint64_t sum = aligned ? fold(words, multipliers, n, Stream{to}) : fold(words, multipliers, n, Store{to});
            total_ += folding_.chunks[word_ / folding_.page_words] * sum;
            words += n, to += n, count -= n, word_ += n;
            if (word_ == folding_.words) {
                *out_++ = total_;
                total_ = folding_.zero, word_ = 0;
            }
        }
    }

  private:
    const Folding folding_;
    uint64_t total_;
    uint64_t* out_;
    long word_ = 0;
};

// 0, or an errno. A read that ends early met memory that is not there.
int copy(int pid, const iovec* to, int num_to, const iovec* from, int num_from, long bytes) {
    const ssize_t done = process_vm_readv(pid, to, num_to, from, num_from, 0);
    return done == bytes ? 0 : done < 0 ? errno : EFAULT;
}

int read_plain(int pid, const Span* spans, long count) {
    iovec to[MAX_PIECES], from[MAX_PIECES];
    for (long first = 0; first < count; first += MAX_PIECES) {
        const int n = static_cast<int>(std::min<long>(MAX_PIECES, count - first));
        long bytes = 0;
        for (int i = 0; i < n; i++) {
            const Span& span = spans[first + i];
            to[i] = {span.to, static_cast<size_t>(span.length)};
            from[i] = {const_cast<char*>(span.at), static_cast<size_t>(span.length)};
            bytes += span.length;
        }
        if (const int error = copy(pid, to, n, from, n, bytes)) return error;
    }
    return 0;
}

int read_folding(int pid, const Span* spans, long count, Folder& folder) {
    static thread_local const Buffer own;
    char* const buffer = own.bytes;
    if (!buffer) return ENOMEM;
    const long room = buffer_bytes();
    iovec from[MAX_PIECES];
    Span pieces[MAX_PIECES];
    long span = 0, done = 0;  // of that span
    while (span < count) {
        long bytes = 0;
        int n = 0;
        for (; span < count && bytes < room && n < MAX_PIECES; n++) {
            const long length = std::min(spans[span].length - done, room - bytes);
            pieces[n] = {spans[span].to + done, spans[span].at + done, length};
            from[n] = {const_cast<char*>(pieces[n].at), static_cast<size_t>(length)};
            bytes += length, done += length;
            if (done == spans[span].length) span++, done = 0;
        }
        const iovec to = {buffer, static_cast<size_t>(bytes)};
        if (const int error = copy(pid, &to, 1, from, n, bytes)) return error;
        const char* words = buffer;
        for (int i = 0; i < n; words += pieces[i++].length) folder.take(words, pieces[i].to, pieces[i].length);
    }
    return 0;
}

void read_mapped(long shift, const Span* spans, long count, Folder* folder) {
    for (long i = 0; i < count; i++) {
        const auto& [to, at, length] = spans[i];
        if (folder)
            folder->take(at + shift, to, length);
        else
            std::memcpy(to, at + shift, length);
    }
}

}  // namespace

// spans: [count, 3] of (own address, address in process `pid`, bytes). Without a `pid`, what they name there is mapped
// here, `shift` bytes further on. With `words`, the spans are parts of `words` words each, one after the other, and out
// has a fingerprint of each. Returns 0 or an errno; then what was written is anything.
extern "C" int tandem_read_memory(int pid, long shift, const Span* spans, long count, long words, const uint64_t* page,
                                  long page_words, const uint64_t* chunks, uint64_t zero, uint64_t* out) {
    Folder folder({words, page, page_words, chunks, zero}, out);
    int error = 0;
    if (!pid)
        read_mapped(shift, spans, count, words ? &folder : nullptr);
    else
        error = words ? read_folding(pid, spans, count, folder) : read_plain(pid, spans, count);
#ifdef __SSE2__
    _mm_sfence();  // streamed words are there for whoever hears that the read is over
#endif
    return error;
}
