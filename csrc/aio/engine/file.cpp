#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "system_error.h"

namespace ds_aio {
namespace {

constexpr long kTmpfs = 0x01021994;
constexpr long kRamfs = 0x858458f6;
// Where the kernel does not tell (before 6.1): no block device in use wants more.
constexpr uint32_t kUnknownAlignment = 4096;

// statx with the fields of 6.1, which the C library's headers may not have.
struct Statx {
    uint32_t mask, block_bytes;
    uint64_t attributes;
    uint32_t n_links, uid, gid;
    uint16_t mode, padding;
    uint64_t inode, n_bytes, n_blocks, attributes_mask;
    uint64_t times[8];
    uint32_t device_numbers[4];
    uint64_t mount_id;
    uint32_t dio_memory_alignment, dio_offset_alignment;
    uint64_t spare[12];
};
static_assert(sizeof(Statx) == 256, "the kernel's layout");
constexpr unsigned kStatxDioAlignment = 0x2000;
#ifndef __NR_statx
#define __NR_statx -1
#endif

// A second descriptor of the same file, whatever its path stands for by now.
int reopen(int fd, int flags)
{
    char path[32];
    std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    return open(path, flags | O_CLOEXEC);
}

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

std::shared_ptr<File> File::open(const char* path, Mode mode)
{
    static constexpr int kFlags[] = {O_RDONLY, O_WRONLY | O_CREAT, O_RDWR | O_CREAT};
    const int flags = kFlags[mode];
    std::shared_ptr<File> file(new File);
    do {
        file->buffered_fd_ = ::open(path, flags | O_CLOEXEC, 0600);
    } while (file->buffered_fd_ < 0 && errno == EINTR);
    if (file->buffered_fd_ < 0) { throw SystemError(errno); }
    file->look_at_file();
    if (file->is_regular_ && !file->is_in_memory_) {
        file->direct_fd_ = reopen(file->buffered_fd_, (flags & ~O_CREAT) | O_DIRECT);
    }
    file->look_at_alignment();
    return file;
}

std::shared_ptr<File> File::adopt(int fd)
{
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0) { throw SystemError(errno); }
    std::shared_ptr<File> file(new File);
    file->buffered_fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (file->buffered_fd_ < 0) { throw SystemError(errno); }
    file->look_at_file();
    if ((flags & O_DIRECT) && file->is_regular_) {
        const int buffered = reopen(fd, flags & (O_ACCMODE | O_APPEND));
        if (buffered >= 0) {
            file->direct_fd_ = file->buffered_fd_;
            file->buffered_fd_ = buffered;
        }  // else all goes through the caller's descriptor, and the kernel says what it refuses
    }
    file->look_at_alignment();
    return file;
}

File::~File()
{
    if (direct_fd_ >= 0) { close(direct_fd_); }
    if (buffered_fd_ >= 0) { close(buffered_fd_); }
}

void File::look_at_file()
{
    struct stat about;
    if (fstat(buffered_fd_, &about) != 0) { throw SystemError(errno); }
    // io_uring would disregard the offset where pwrite refuses it.
    if (S_ISFIFO(about.st_mode) || S_ISSOCK(about.st_mode)) { throw SystemError(ESPIPE); }
    device_ = about.st_dev;
    is_regular_ = S_ISREG(about.st_mode);
    struct statfs system;
    if (fstatfs(buffered_fd_, &system) == 0) {
        const auto type = static_cast<unsigned long>(system.f_type) & 0xffffffffUL;
        is_in_memory_ = type == static_cast<unsigned long>(kTmpfs) || type == static_cast<unsigned long>(kRamfs);
    }
}

void File::look_at_alignment()
{
    if (direct_fd_ < 0) { return; }
    memory_alignment_ = offset_alignment_ = kUnknownAlignment;
    Statx about{};
    if (syscall(__NR_statx, direct_fd_, "", AT_EMPTY_PATH, kStatxDioAlignment, &about) == 0 &&
        (about.mask & kStatxDioAlignment)) {
        memory_alignment_ = about.dio_memory_alignment;
        offset_alignment_ = about.dio_offset_alignment;
        if (offset_alignment_ == 0) { refuse_direct(); }
    }
}

bool File::suits_direct(uint64_t offset, uint64_t n_bytes) const
{
    return is_direct() && offset % offset_alignment_ == 0 && n_bytes % offset_alignment_ == 0;
}

bool File::suits_direct(const void* memory) const
{
    return memory_alignment_ == 0 || reinterpret_cast<uint64_t>(memory) % memory_alignment_ == 0;
}

int File::reserve(uint64_t offset, uint64_t n_bytes) const
{
    struct stat about;
    if (!is_regular_ || fstat(buffered_fd_, &about) != 0) { return 0; }
    if (offset + n_bytes <= static_cast<uint64_t>(about.st_size)) { return 0; }
    int outcome;
    do {
        outcome = fallocate(buffered_fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(n_bytes));
    } while (outcome != 0 && errno == EINTR);
    if (outcome == 0) { return 0; }
    // These say that the write itself would fail. Anything else (EOPNOTSUPP) says nothing about it.
    return errno == ENOSPC || errno == EFBIG || errno == EDQUOT || errno == EIO ? -errno : 0;
}

Split split_transfer(const File& file, uint64_t offset, uint64_t n_bytes)
{
    const Split buffered{n_bytes, 0, 0};
    if (!file.is_direct()) { return buffered; }
    const uint64_t unit = round_up(static_cast<uint64_t>(sysconf(_SC_PAGESIZE)), file.offset_alignment());
    const uint64_t begin = round_up(offset, unit);
    const uint64_t end = (offset + n_bytes) / unit * unit;
    if (begin >= end) { return buffered; }
    return {begin - offset, end - begin, offset + n_bytes - end};
}

}  // namespace ds_aio
