// One io_uring instance, spoken to through raw system calls: no liburing, and no kernel headers either, since those of a
// build machine may be older than the kernel that runs. Everything below is the kernel's stable binary interface.

#pragma once

#include <cstdint>

namespace ds_aio {

struct Completion {
    uint64_t tag;
    int32_t result;  // bytes, or -errno
};

// Used by one thread, except for the constructor and the destructor. What was submitted and has not completed must be
// reaped before the ring goes: the kernel would go on writing into the caller's memory.
class Ring {
   public:
    // Throws SystemError where the kernel does not let us (ENOSYS, EPERM, ENOMEM), or lacks what is used here.
    explicit Ring(unsigned n_entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // No more may be prepared or under way at once than the ring was made for.
    void prepare_transfer(bool is_write, int fd, void* address, uint32_t n_bytes, uint64_t offset, uint64_t tag);

    // Hands over what was prepared and waits until at least this many have completed. Returns 0 or -errno; what the
    // kernel did not take stays prepared.
    int enter(unsigned n_wait);
    bool reap(Completion* completion);

   private:
    struct Mapping {
        void* address = nullptr;
        uint64_t n_bytes = 0;
    };

    void map(Mapping* mapping, uint64_t n_bytes, uint64_t offset);
    void release();
    void require_opcodes();

    int fd_ = -1;
    unsigned prepared_tail_ = 0;  // entries up to here are written; the kernel learns of them in enter()
    Mapping rings_;
    Mapping entries_;
    unsigned* submission_head_ = nullptr;
    unsigned* submission_tail_ = nullptr;
    unsigned* submission_indices_ = nullptr;
    unsigned submission_mask_ = 0;
    unsigned* completion_head_ = nullptr;
    unsigned* completion_tail_ = nullptr;
    unsigned completion_mask_ = 0;
    const void* completions_ = nullptr;
};

}  // namespace ds_aio
