// Units of work, in the order in which memory is read, dealt out to the threads of a team.
//
// Each thread begins with a run of its own, so that what it fetches ahead is what it will need. One that has finished
// takes half of what the slowest has left: a thread that loses its core for a while holds up little.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace {

class Deal {
   public:
    // To threads 0 to `threads` - 1, of which some may never ask.
    Deal(long units, int threads) : runs_(new Run[threads]), threads_(threads) {
        for (int t = 0; t < threads; t++) runs_[t].left = packed(units * t / threads, units * (t + 1) / threads);
    }

    // The next unit for a thread, or -1: there is none left.
    long take(int thread) {
        while (true) {
            uint64_t left = runs_[thread].left.load(std::memory_order_relaxed);
            while (count(left)) {
                if (runs_[thread].left.compare_exchange_weak(left, left + 1)) return first(left);
            }
            if (!rob(thread)) return -1;
        }
    }

   private:
    // A cache line for each: the units that nobody has taken yet, first and end.
    struct alignas(64) Run {
        std::atomic<uint64_t> left;
    };

    static uint64_t packed(long first, long end) { return uint64_t(end) << 32 | uint64_t(first); }
    static long first(uint64_t left) { return long(left & 0xffffffff); }
    static long end(uint64_t left) { return long(left >> 32); }
    static long count(uint64_t left) { return end(left) - first(left); }

    // Give a thread that has nothing left the second half of the longest run; false when all are empty.
    bool rob(int thread) {
        while (true) {
            int richest = 0;
            uint64_t most = runs_[0].left.load(std::memory_order_relaxed);
            for (int t = 1; t < threads_; t++) {
                const uint64_t left = runs_[t].left.load(std::memory_order_relaxed);
                if (count(left) > count(most)) richest = t, most = left;
            }
            if (!count(most)) return false;
            const long half = first(most) + count(most) / 2;
            if (!runs_[richest].left.compare_exchange_strong(most, packed(first(most), half))) continue;
            runs_[thread].left.store(packed(half, end(most)));
            return true;
        }
    }

    std::unique_ptr<Run[]> runs_;
    int threads_;
};

}  // namespace
