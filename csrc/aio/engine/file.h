// A file that can be reached past the page cache and through it, and what part of a transfer goes which way.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace ds_aio {

// Shared by the caller and by the requests in flight; the descriptors are closed with the last of them.
class File {
   public:
    enum Mode { kRead = 0, kWrite = 1, kReadWrite = 2 };

    // Write modes create the file. Throws SystemError.
    static std::shared_ptr<File> open(const char* path, Mode mode);
    // A descriptor of the caller's, who may close it at once. It stays what it is: direct only if it is so already.
    static std::shared_ptr<File> adopt(int fd);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    int buffered_fd() const { return buffered_fd_; }
    int direct_fd() const { return direct_fd_; }
    bool is_direct() const { return direct_fd_ >= 0 && !refused_.load(std::memory_order_relaxed); }
    // The file system took O_DIRECT when the file was opened, and now a transfer that suits all that is known was
    // refused. Buffered from here on.
    void refuse_direct() { refused_.store(true, std::memory_order_relaxed); }

    uint64_t device() const { return device_; }
    bool is_in_memory() const { return is_in_memory_; }
    bool is_regular() const { return is_regular_; }
    uint32_t memory_alignment() const { return memory_alignment_; }
    uint32_t offset_alignment() const { return offset_alignment_; }
    bool suits_direct(uint64_t offset, uint64_t n_bytes) const;
    bool suits_direct(const void* memory) const;

    // Gives blocks to a range that a write will reach into, where that lies beyond the end of the file. 0 or -errno.
    int reserve(uint64_t offset, uint64_t n_bytes) const;

   private:
    File() = default;
    void look_at_file();
    void look_at_alignment();

    int buffered_fd_ = -1;
    int direct_fd_ = -1;
    std::atomic<bool> refused_{false};
    uint64_t device_ = 0;
    bool is_regular_ = false;
    bool is_in_memory_ = false;
    uint32_t memory_alignment_ = 0;
    uint32_t offset_alignment_ = 0;
};

// How a transfer is cut: the head and the tail go through the page cache, the body past it, if there is one.
struct Split {
    uint64_t head_bytes;
    uint64_t body_bytes;
    uint64_t tail_bytes;
};

// [Note: whole pages only] The body consists of whole pages of the file even where the device would take 512 bytes. So
// a page is either written directly, by one request, or through the page cache, and the page lock puts together what
// two requests write into different parts of it. Were a page written both ways at once, the cache could write its old
// half over the new one. For the same reason the head and the tail of a write follow when its body has been written:
// the end of a direct write drops what the cache holds of the range, and must not meet pages that are being changed.
Split split_transfer(const File& file, uint64_t offset, uint64_t n_bytes);

}  // namespace ds_aio
