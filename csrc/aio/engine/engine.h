// Requests, the blocks that they are cut into, and the threads that carry them out.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "file.h"
#include "ring.h"

namespace ds_aio {

enum class Backend { kAuto = 0, kRing = 1, kThreads = 2 };

enum class Way {
    kPageCache,
    kDirect,
    kBounced,  // directly, between the file and aligned memory of the worker's, which copies from there or to there
};

// Part of a request that is not cut into blocks yet, or a block.
struct Range {
    uint64_t offset = 0;
    uint64_t n_bytes = 0;
    Way way = Way::kPageCache;
};

// One transfer. All but the constants belong to the engine's mutex.
struct Request {
    uint64_t id = 0;
    std::shared_ptr<File> file;
    bool is_write = false;
    uint64_t offset = 0;
    char* memory = nullptr;

    std::vector<Range> ranges;  // what is left to be cut, last one first
    bool is_edge_next = false;  // what is left waits until the body has been written [Note: whole pages only]
    bool is_parked = false;     // taken off the queue for that reason
    uint64_t n_outstanding = 0;  // blocks that the kernel or a worker has, or that are to be tried again

    uint64_t n_done_bytes = 0;
    int error = 0;  // errno of the first failure
    uint64_t error_offset = 0;
    bool fell_back = false;  // a direct transfer was refused and was done through the page cache
    bool is_done = false;
};

struct Block {
    std::shared_ptr<Request> request;
    Range range;
    unsigned n_fruitless = 0;  // EAGAIN and EINTR in a row
};

struct Stats {
    uint64_t n_threads;
    uint64_t n_in_flight_requests;
    uint64_t n_completions;
    uint64_t direct_bytes;
    uint64_t bounced_bytes;  // part of the direct ones
    uint64_t buffered_bytes;
    uint64_t most_blocks_at_once;
    uint64_t is_ring;
};

// Of one process: a forked child must not call anything but owner(). Thread-safe.
class Engine {
   public:
    // Throws SystemError where threads, or a ring that was asked for, cannot be had.
    Engine(uint64_t block_bytes, unsigned queue_depth, unsigned n_workers, Backend backend);
    // Waits for what is in flight.
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    int owner() const { return owner_; }
    uint64_t submit(std::shared_ptr<File> file, bool is_write, uint64_t offset, char* memory, uint64_t n_bytes);
    // Waits up to this long, for ever if negative. Returns 0, -ETIME, or -ENOENT. Once it has returned 0, nothing
    // touches the request's memory any more. The result can be asked for again until it is forgotten.
    int wait(uint64_t id, int64_t timeout_ns, Request* result);
    void forget(uint64_t id);
    // Waits for what is in flight and ends the threads. Results can still be asked for; nothing can be submitted.
    void stop();
    Stats stats();

    // For tests: the n-th completion from now on has this result instead (a byte count can only be made smaller).
    void inject(uint64_t nth, int result);
    // For tests: while set, no new block is begun.
    void hold(bool is_held);

   private:
    class RingWorker;

    void start(unsigned n_workers, Backend backend);
    void run_thread();
    void wake(uint64_t n_blocks);

    // All of these want the mutex.
    bool has_block() const { return !is_held_ && (!again_.empty() || !queue_.empty()); }
    void take(uint64_t n_most, std::vector<Block>* blocks);
    bool cut(Request* request, Range* range) const;
    uint64_t bounce_bytes() const;
    void complete(Block block, int64_t result);
    void try_again(Block block);
    void fail(Request* request, int error, uint64_t offset);
    void settle(const std::shared_ptr<Request>& request);
    int64_t injected(int64_t result);

    const int owner_;
    const uint64_t block_bytes_;
    const unsigned queue_depth_;

    std::mutex mutex_;
    std::condition_variable work_;  // for the thread backend; rings are woken through their event descriptors
    std::condition_variable done_;
    std::deque<std::shared_ptr<Request>> queue_;
    std::deque<Block> again_;
    std::unordered_map<uint64_t, std::shared_ptr<Request>> requests_;
    std::unordered_map<uint64_t, int> injections_;  // number of the completion -> result
    uint64_t next_id_ = 1;
    uint64_t n_unfinished_ = 0;
    uint64_t n_blocks_out_ = 0;
    bool is_held_ = false;
    bool is_stopping_ = false;
    Stats stats_{};

    std::vector<std::unique_ptr<RingWorker>> rings_;
    std::vector<std::thread> threads_;
};

}  // namespace ds_aio
