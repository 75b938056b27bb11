#include "engine.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "../../pin_memory/pages.h"
#include "system_error.h"

namespace ds_aio {
namespace {

// A transfer of 2 GiB or more is cut short by the kernel.
constexpr uint64_t kMostBlockBytes = uint64_t{1} << 30;
constexpr unsigned kMostQueueDepth = 4096;
// One thread carries one block at a time, so a deep queue would be many threads.
constexpr unsigned kMostThreads = 16;
// With several workers, no more than this at once, so that one request is shared among them.
constexpr uint64_t kShareBlocks = 8;
// Of each worker, for transfers whose memory does not suit the device. Their blocks are made smaller to keep to it.
constexpr uint64_t kBounceBytes = uint64_t{16} << 20;
constexpr uint64_t kPageBytes = 4096;
constexpr unsigned kMostFruitless = 1000;
constexpr auto kFruitlessPause = std::chrono::microseconds(100);

uint64_t whole_pages(uint64_t n_bytes)
{
    return std::clamp((n_bytes + kPageBytes - 1) / kPageBytes * kPageBytes, kPageBytes, kMostBlockBytes);
}

// Threads that begin in its scope get no signals: those are for Python's main thread.
class SignalsBlocked {
   public:
    SignalsBlocked()
    {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

   private:
    sigset_t before_;
};

// Aligned memory of a worker, a part for each of its blocks; made when it is first wanted.
class Bounces {
   public:
    Bounces(uint64_t n_parts, uint64_t part_bytes) : n_parts_(n_parts), part_bytes_(part_bytes) {}
    ~Bounces()
    {
        if (memory_ != nullptr) { munmap(memory_, n_parts_ * part_bytes_); }
    }
    Bounces(const Bounces&) = delete;
    Bounces& operator=(const Bounces&) = delete;

    // Null if there is no memory.
    char* part(uint64_t index)
    {
        if (memory_ == nullptr && ds_pages::map(n_parts_ * part_bytes_, &memory_) != 0) { return nullptr; }
        return static_cast<char*>(memory_) + index * part_bytes_;
    }

   private:
    const uint64_t n_parts_;
    const uint64_t part_bytes_;
    void* memory_ = nullptr;
};

char* memory_of(const Block& block) { return block.request->memory + (block.range.offset - block.request->offset); }

// What the kernel is to read from or write to. Without memory to spare, the block goes through the page cache.
char* prepare_memory(Block* block, Bounces* bounces, uint64_t slot)
{
    char* memory = memory_of(*block);
    if (block->range.way != Way::kBounced) { return memory; }
    char* aligned = bounces->part(slot);
    if (aligned == nullptr) {
        block->range.way = Way::kPageCache;
        return memory;
    }
    if (block->request->is_write) { std::memcpy(aligned, memory, block->range.n_bytes); }
    return aligned;
}

// Before the block is told to be complete: after that nobody may write to the request's memory.
void deliver(const Block& block, Bounces* bounces, uint64_t slot, int64_t result)
{
    if (block.range.way == Way::kBounced && !block.request->is_write && result > 0) {
        std::memcpy(memory_of(block), bounces->part(slot), static_cast<uint64_t>(result));
    }
}

int descriptor_of(const Block& block)
{
    const File& file = *block.request->file;
    return block.range.way == Way::kPageCache ? file.buffered_fd() : file.direct_fd();
}

int64_t transfer(Block* block, Bounces* bounces)
{
    char* memory = prepare_memory(block, bounces, 0);
    const int fd = descriptor_of(*block);
    const auto offset = static_cast<off_t>(block->range.offset);
    const ssize_t n_bytes = block->request->is_write ? pwrite(fd, memory, block->range.n_bytes, offset)
                                                     : pread(fd, memory, block->range.n_bytes, offset);
    if (n_bytes < 0) { return -errno; }
    deliver(*block, bounces, 0, n_bytes);
    return n_bytes;
}

}  // namespace

// A thread with a ring of its own. It sleeps in the kernel only, where either a completion or its event wakes it.
class Engine::RingWorker {
   public:
    // One entry more than blocks, for reading the event.
    RingWorker(Engine* engine, unsigned queue_depth)
        : engine_(engine),
          ring_(queue_depth + 1),
          event_(eventfd(0, EFD_CLOEXEC)),
          blocks_(queue_depth),
          bounces_(queue_depth, engine->bounce_bytes())
    {
        if (event_ < 0) { throw SystemError(errno); }
        for (unsigned slot = 0; slot < queue_depth; ++slot) { free_slots_.push_back(slot); }
    }
    ~RingWorker() { close(event_); }
    RingWorker(const RingWorker&) = delete;
    RingWorker& operator=(const RingWorker&) = delete;

    void wake()
    {
        if (is_woken_.exchange(true)) { return; }
        const uint64_t one = 1;
        ssize_t written;
        do {
            written = write(event_, &one, sizeof(one));
        } while (written < 0 && errno == EINTR);
    }

    void run()
    {
        std::vector<Block> blocks;
        listen();
        for (;;) {
            blocks.clear();
            bool is_stopping;
            {
                std::lock_guard<std::mutex> lock(engine_->mutex_);
                const uint64_t n_free = free_slots_.size();
                engine_->take(engine_->rings_.size() > 1 ? std::min(n_free, kShareBlocks) : n_free, &blocks);
                is_stopping = engine_->is_stopping_ && engine_->n_unfinished_ == 0;
            }
            if (is_stopping && free_slots_.size() == blocks_.size()) { return; }
            for (Block& block : blocks) { prepare(std::move(block)); }
            const int outcome = ring_.enter(blocks.empty() ? 1 : 0);
            // EBUSY and EAGAIN want completions to be taken first; EINTR, another try. No other error can come of what
            // is done here, and none may be answered by leaving blocks in the kernel's hands.
            if (outcome != 0 && outcome != -EINTR) { std::this_thread::sleep_for(kFruitlessPause); }
            take_completions();
        }
    }

   private:
    static constexpr uint64_t kEventTag = ~uint64_t{0};

    void listen() { ring_.prepare_transfer(false, event_, &event_count_, sizeof(event_count_), 0, kEventTag); }

    void prepare(Block block)
    {
        const unsigned slot = free_slots_.back();
        free_slots_.pop_back();
        char* memory = prepare_memory(&block, &bounces_, slot);
        const Range& range = block.range;
        ring_.prepare_transfer(block.request->is_write, descriptor_of(block), memory,
                               static_cast<uint32_t>(range.n_bytes), range.offset, slot);
        blocks_[slot] = std::move(block);
    }

    void take_completions()
    {
        Completion completion;
        bool is_event = false;
        reaped_.clear();
        while (ring_.reap(&completion)) {
            if (completion.tag == kEventTag) {
                is_event = true;
            } else {
                const auto slot = static_cast<unsigned>(completion.tag);
                deliver(blocks_[slot], &bounces_, slot, completion.result);
                reaped_.push_back(completion);
            }
        }
        if (!reaped_.empty()) {
            std::lock_guard<std::mutex> lock(engine_->mutex_);
            for (const Completion& each : reaped_) {
                const auto slot = static_cast<unsigned>(each.tag);
                free_slots_.push_back(slot);
                engine_->complete(std::exchange(blocks_[slot], Block{}), each.result);
            }
        }
        if (is_event) {
            // Before work is looked for again: what comes after that look must be able to wake us.
            is_woken_.store(false);
            listen();
        }
    }

    Engine* engine_;
    Ring ring_;
    const int event_;
    uint64_t event_count_ = 0;
    std::atomic<bool> is_woken_{false};
    std::vector<Block> blocks_;  // by slot, as are the bounces
    Bounces bounces_;
    std::vector<unsigned> free_slots_;
    std::vector<Completion> reaped_;
};

Engine::Engine(uint64_t block_bytes, unsigned queue_depth, unsigned n_workers, Backend backend)
    : owner_(getpid()),
      block_bytes_(whole_pages(block_bytes)),
      queue_depth_(std::clamp(queue_depth, 1u, kMostQueueDepth))
{
    start(std::max(n_workers, 1u), backend);
}

Engine::~Engine() { stop(); }

void Engine::start(unsigned n_workers, Backend backend)
{
    if (backend != Backend::kThreads) {
        try {
            for (unsigned i = 0; i < n_workers; ++i) {
                rings_.push_back(std::make_unique<RingWorker>(this, queue_depth_));
            }
        } catch (const SystemError&) {
            rings_.clear();
            if (backend == Backend::kRing) { throw; }
        }
    }
    const SignalsBlocked blocked;
    try {
        for (const auto& ring : rings_) { threads_.emplace_back([worker = ring.get()] { worker->run(); }); }
        if (rings_.empty()) {
            // As many blocks at once as the queue is deep, within reason.
            const unsigned n_threads = std::max(n_workers, std::min(queue_depth_, kMostThreads));
            for (unsigned i = 0; i < n_threads; ++i) { threads_.emplace_back([this] { run_thread(); }); }
        }
    } catch (const std::system_error& error) {
        stop();
        throw SystemError(error.code().value());
    }
    stats_.n_threads = threads_.size();
    stats_.is_ring = rings_.empty() ? 0 : 1;
}

void Engine::stop()
{
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<RingWorker>> rings;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        is_held_ = false;
        wake(UINT64_MAX);
        done_.wait(lock, [this] { return n_unfinished_ == 0; });
        is_stopping_ = true;
        wake(UINT64_MAX);
        // Whoever stops it at the same time finds nothing left to do.
        threads.swap(threads_);
        rings.swap(rings_);
    }
    for (std::thread& thread : threads) { thread.join(); }
}

void Engine::wake(uint64_t n_blocks)
{
    if (!rings_.empty()) {
        const uint64_t n_rings = std::min<uint64_t>(n_blocks, rings_.size());
        for (uint64_t i = 0; i < n_rings; ++i) { rings_[i]->wake(); }
    } else if (n_blocks == 1) {
        work_.notify_one();
    } else {
        work_.notify_all();
    }
}

void Engine::run_thread()
{
    std::vector<Block> blocks;
    Bounces bounces(1, bounce_bytes());
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        work_.wait(lock, [this] { return has_block() || is_stopping_; });
        if (is_stopping_ && !has_block()) { return; }
        blocks.clear();
        take(1, &blocks);
        if (blocks.empty()) { continue; }
        lock.unlock();
        const int64_t result = transfer(&blocks.front(), &bounces);
        if (result == -EAGAIN) { std::this_thread::sleep_for(kFruitlessPause); }
        lock.lock();
        complete(std::move(blocks.front()), result);
    }
}

uint64_t Engine::submit(std::shared_ptr<File> file, bool is_write, uint64_t offset, char* memory, uint64_t n_bytes)
{
    auto request = std::make_shared<Request>();
    const Split split = split_transfer(*file, offset, n_bytes);
    const uint64_t body_offset = offset + split.head_bytes;
    const uint64_t tail_offset = body_offset + split.body_bytes;
    if (split.tail_bytes > 0) { request->ranges.push_back({tail_offset, split.tail_bytes, Way::kPageCache}); }
    if (split.head_bytes > 0) { request->ranges.push_back({offset, split.head_bytes, Way::kPageCache}); }
    if (split.body_bytes > 0) {
        const Way way = file->suits_direct(memory + split.head_bytes) ? Way::kDirect : Way::kBounced;
        request->ranges.push_back({body_offset, split.body_bytes, way});
    }
    request->file = std::move(file);
    request->is_write = is_write;
    request->offset = offset;
    request->memory = memory;
    // A direct write beyond the end of a file, or into a hole, keeps every other write out of the file until it is done.
    // Into blocks that were reserved they go side by side.
    int error = 0;
    if (is_write && split.body_bytes > block_bytes_) { error = request->file->reserve(offset, n_bytes); }

    std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopping_) { throw SystemError(ESHUTDOWN); }
    request->id = next_id_++;
    requests_.emplace(request->id, request);
    ++n_unfinished_;
    if (error != 0) { fail(request.get(), -error, offset); }
    if (request->ranges.empty()) {
        settle(request);
    } else {
        queue_.push_back(request);
        wake(n_bytes / block_bytes_ + 1);
    }
    return request->id;
}

int Engine::wait(uint64_t id, int64_t timeout_ns, Request* result)
{
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = requests_.find(id);
    if (found == requests_.end()) { return -ENOENT; }
    const std::shared_ptr<Request> request = found->second;
    const auto is_done = [&request] { return request->is_done; };
    if (timeout_ns < 0) {
        done_.wait(lock, is_done);
    } else if (!done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_done)) {
        return -ETIME;
    }
    *result = *request;
    return 0;
}

void Engine::forget(uint64_t id)
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(id);
    if (found != requests_.end() && found->second->is_done) { requests_.erase(found); }
}

Stats Engine::stats()
{
    std::lock_guard<std::mutex> lock(mutex_);
    Stats stats = stats_;
    stats.n_in_flight_requests = n_unfinished_;
    return stats;
}

void Engine::inject(uint64_t nth, int result)
{
    std::lock_guard<std::mutex> lock(mutex_);
    injections_[stats_.n_completions + nth] = result;
}

void Engine::hold(bool is_held)
{
    std::lock_guard<std::mutex> lock(mutex_);
    is_held_ = is_held;
    if (!is_held) { wake(UINT64_MAX); }
}

void Engine::take(uint64_t n_most, std::vector<Block>* blocks)
{
    while (blocks->size() < n_most && has_block()) {
        Block block;
        if (!again_.empty()) {
            block = std::move(again_.front());
            again_.pop_front();
            if (block.request->error != 0) {
                --block.request->n_outstanding;
                settle(block.request);
                continue;
            }
        } else {
            block.request = queue_.front();
            Request& request = *block.request;
            if (!cut(&request, &block.range)) {
                request.is_parked = !request.ranges.empty();
                queue_.pop_front();
                continue;
            }
            ++request.n_outstanding;
        }
        ++n_blocks_out_;
        stats_.most_blocks_at_once = std::max(stats_.most_blocks_at_once, n_blocks_out_);
        blocks->push_back(std::move(block));
    }
}

bool Engine::cut(Request* request, Range* range) const
{
    if (request->ranges.empty()) { return false; }
    if (request->is_edge_next && request->n_outstanding > 0) { return false; }
    Range& left = request->ranges.back();
    const uint64_t most_bytes = left.way == Way::kBounced ? bounce_bytes() : block_bytes_;
    *range = {left.offset, std::min(left.n_bytes, most_bytes), left.way};
    left.offset += range->n_bytes;
    left.n_bytes -= range->n_bytes;
    request->is_edge_next = false;
    if (left.n_bytes == 0) {
        request->ranges.pop_back();
        request->is_edge_next = request->is_write && range->way != Way::kPageCache && !request->ranges.empty();
    }
    return true;
}

uint64_t Engine::bounce_bytes() const
{
    return std::clamp(kBounceBytes / queue_depth_ / kPageBytes * kPageBytes, kPageBytes, block_bytes_);
}

void Engine::complete(Block block, int64_t result)
{
    --n_blocks_out_;
    ++stats_.n_completions;
    result = injected(result);
    Request& request = *block.request;
    Range& range = block.range;
    if (result == -EINTR || result == -EAGAIN) {
        if (++block.n_fruitless < kMostFruitless) { return try_again(std::move(block)); }
        fail(&request, static_cast<int>(-result), range.offset);
    } else if (result == -EINVAL && range.way != Way::kPageCache) {
        request.file->refuse_direct();
        request.fell_back = true;
        range.way = Way::kPageCache;
        return try_again(std::move(block));
    } else if (result < 0) {
        fail(&request, static_cast<int>(-result), range.offset);
    } else if (result == 0) {
        fail(&request, request.is_write ? EIO : ENODATA, range.offset);
    } else {
        const uint64_t n_bytes = static_cast<uint64_t>(result);
        request.n_done_bytes += n_bytes;
        (range.way == Way::kPageCache ? stats_.buffered_bytes : stats_.direct_bytes) += n_bytes;
        if (range.way == Way::kBounced) { stats_.bounced_bytes += n_bytes; }
        range.offset += n_bytes;
        range.n_bytes -= n_bytes;
        if (range.n_bytes > 0) {
            if (!request.file->suits_direct(range.offset, range.n_bytes)) { range.way = Way::kPageCache; }
            if (range.way == Way::kDirect && !request.file->suits_direct(memory_of(block))) { range.way = Way::kBounced; }
            block.n_fruitless = 0;
            return try_again(std::move(block));
        }
    }
    --request.n_outstanding;
    settle(block.request);
}

void Engine::try_again(Block block)
{
    again_.push_back(std::move(block));
    if (!is_held_) { wake(1); }
}

void Engine::fail(Request* request, int error, uint64_t offset)
{
    if (request->error == 0) {
        request->error = error;
        request->error_offset = offset;
    }
    request->ranges.clear();
}

void Engine::settle(const std::shared_ptr<Request>& request)
{
    if (request->n_outstanding > 0 || request->is_done) { return; }
    if (!request->ranges.empty()) {
        if (request->is_parked) {
            request->is_parked = false;
            queue_.push_front(request);
            wake(1);
        }
        return;
    }
    request->is_done = true;
    request->file.reset();
    --n_unfinished_;
    done_.notify_all();
}

int64_t Engine::injected(int64_t result)
{
    const auto found = injections_.find(stats_.n_completions);
    if (found == injections_.end()) { return result; }
    const int64_t wanted = found->second;
    injections_.erase(found);
    return wanted < 0 ? wanted : std::min(wanted, result);
}

}  // namespace ds_aio
