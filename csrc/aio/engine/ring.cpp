#include "ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "system_error.h"

namespace ds_aio {
namespace {

// The numbers are the same on every architecture but Alpha.
constexpr long kSetupCall = 425;
constexpr long kEnterCall = 426;
constexpr long kRegisterCall = 427;

constexpr uint8_t kOpRead = 22;
constexpr uint8_t kOpWrite = 23;
constexpr uint32_t kSetupClamp = 1u << 4;
constexpr uint32_t kFeatureSingleMap = 1u << 0;
constexpr uint32_t kFeatureNoDrop = 1u << 1;
constexpr unsigned kEnterGetEvents = 1u << 0;
constexpr unsigned kRegisterProbe = 8;
constexpr uint64_t kOffsetOfRings = 0;
constexpr uint64_t kOffsetOfEntries = 0x10000000;

struct SubmissionEntry {
    uint8_t opcode;
    uint8_t flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t n_bytes;
    uint32_t rw_flags;
    uint64_t tag;
    uint64_t unused[3];
};
static_assert(sizeof(SubmissionEntry) == 64, "the kernel's layout");

struct CompletionEntry {
    uint64_t tag;
    int32_t result;
    uint32_t flags;
};
static_assert(sizeof(CompletionEntry) == 16, "the kernel's layout");

struct SubmissionOffsets {
    uint32_t head, tail, mask, n_entries, flags, dropped, indices, reserved;
    uint64_t user_address;
};

struct CompletionOffsets {
    uint32_t head, tail, mask, n_entries, overflow, entries, flags, reserved;
    uint64_t user_address;
};

struct Parameters {
    uint32_t n_submission_entries, n_completion_entries, flags, thread_cpu, thread_idle, features, attached_fd;
    uint32_t reserved[3];
    SubmissionOffsets submission;
    CompletionOffsets completion;
};
static_assert(sizeof(Parameters) == 120, "the kernel's layout");

struct ProbeOperation {
    uint8_t opcode, reserved;
    uint16_t flags;  // bit 0: supported
    uint32_t reserved2;
};

struct Probe {
    uint8_t last_opcode, n_operations;
    uint16_t reserved;
    uint32_t reserved2[3];
    ProbeOperation operations[64];
};

template <typename T>
T* at(void* base, uint32_t n_bytes)
{
    return reinterpret_cast<T*>(static_cast<char*>(base) + n_bytes);
}

}  // namespace

Ring::Ring(unsigned n_entries)
{
    Parameters parameters{};
    parameters.flags = kSetupClamp;
    fd_ = static_cast<int>(syscall(kSetupCall, n_entries, &parameters));
    if (fd_ < 0) { throw SystemError(errno); }
    try {
        // Both have been there since 5.5. Without "no drop" a full completion queue would lose results.
        if (!(parameters.features & kFeatureSingleMap) || !(parameters.features & kFeatureNoDrop)) {
            throw SystemError(ENOSYS);
        }
        require_opcodes();
        const uint64_t submission_bytes =
            parameters.submission.indices + uint64_t{parameters.n_submission_entries} * sizeof(uint32_t);
        const uint64_t completion_bytes =
            parameters.completion.entries + uint64_t{parameters.n_completion_entries} * sizeof(CompletionEntry);
        map(&rings_, submission_bytes > completion_bytes ? submission_bytes : completion_bytes, kOffsetOfRings);
        map(&entries_, uint64_t{parameters.n_submission_entries} * sizeof(SubmissionEntry), kOffsetOfEntries);
    } catch (...) {
        release();
        throw;
    }
    void* base = rings_.address;
    submission_head_ = at<unsigned>(base, parameters.submission.head);
    submission_tail_ = at<unsigned>(base, parameters.submission.tail);
    submission_mask_ = *at<unsigned>(base, parameters.submission.mask);
    submission_indices_ = at<unsigned>(base, parameters.submission.indices);
    completion_head_ = at<unsigned>(base, parameters.completion.head);
    completion_tail_ = at<unsigned>(base, parameters.completion.tail);
    completion_mask_ = *at<unsigned>(base, parameters.completion.mask);
    completions_ = at<CompletionEntry>(base, parameters.completion.entries);
    prepared_tail_ = *submission_tail_;
}

Ring::~Ring() { release(); }

void Ring::map(Mapping* mapping, uint64_t n_bytes, uint64_t offset)
{
    void* address = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                         static_cast<off_t>(offset));
    if (address == MAP_FAILED) { throw SystemError(errno); }
    *mapping = {address, n_bytes};
    // A forked child must not be able to touch the queues of its parent.
    madvise(address, n_bytes, MADV_DONTFORK);
}

void Ring::release()
{
    for (const Mapping& mapping : {rings_, entries_}) {
        if (mapping.address != nullptr) { munmap(mapping.address, mapping.n_bytes); }
    }
    if (fd_ >= 0) { close(fd_); }
}

void Ring::require_opcodes()
{
    Probe probe{};
    const unsigned n_operations = sizeof(probe.operations) / sizeof(ProbeOperation);
    if (syscall(kRegisterCall, fd_, kRegisterProbe, &probe, n_operations) < 0) { throw SystemError(ENOSYS); }
    for (const unsigned opcode : {kOpRead, kOpWrite}) {
        if (opcode > probe.last_opcode || !(probe.operations[opcode].flags & 1)) { throw SystemError(ENOSYS); }
    }
}

void Ring::prepare_transfer(bool is_write, int fd, void* address, uint32_t n_bytes, uint64_t offset, uint64_t tag)
{
    const unsigned index = prepared_tail_ & submission_mask_;
    SubmissionEntry entry{};
    entry.opcode = is_write ? kOpWrite : kOpRead;
    entry.fd = fd;
    entry.offset = offset;
    entry.address = reinterpret_cast<uint64_t>(address);
    entry.n_bytes = n_bytes;
    entry.tag = tag;
    static_cast<SubmissionEntry*>(entries_.address)[index] = entry;
    submission_indices_[index] = index;
    ++prepared_tail_;
}

int Ring::enter(unsigned n_wait)
{
    __atomic_store_n(submission_tail_, prepared_tail_, __ATOMIC_RELEASE);
    const unsigned n_submit = prepared_tail_ - __atomic_load_n(submission_head_, __ATOMIC_ACQUIRE);
    if (n_submit == 0 && n_wait == 0) { return 0; }
    const long entered =
        syscall(kEnterCall, fd_, n_submit, n_wait, n_wait > 0 ? kEnterGetEvents : 0u, nullptr, size_t{0});
    return entered < 0 ? -errno : 0;
}

bool Ring::reap(Completion* completion)
{
    const unsigned head = *completion_head_;
    if (head == __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE)) { return false; }
    const CompletionEntry& entry = static_cast<const CompletionEntry*>(completions_)[head & completion_mask_];
    *completion = {entry.tag, entry.result};
    __atomic_store_n(completion_head_, head + 1, __ATOMIC_RELEASE);
    return true;
}

}  // namespace ds_aio
