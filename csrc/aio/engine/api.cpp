// The library's only interface: plain C, for ctypes (which gives up Python's lock around each call). Results are 0 or
// -errno. Nothing is printed and nothing is thrown across it. deepspeed/ops/aio/library.py declares the same.

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <new>

#include "engine.h"
#include "file.h"
#include "system_error.h"

using ds_aio::Engine;
using ds_aio::File;

namespace {

template <typename Function>
int guarded(Function function) noexcept
{
    try {
        return function();
    } catch (const ds_aio::SystemError& error) {
        return -error.code;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    } catch (...) {
        return -EIO;
    }
}

bool is_elsewhere(const Engine* engine) { return engine->owner() != getpid(); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

struct ds_aio_file {
    std::shared_ptr<File> file;
};

struct ds_aio_file_facts {
    uint64_t device;
    uint32_t is_direct;
    uint32_t is_in_memory;
    uint32_t is_regular;
    uint32_t memory_alignment_bytes;
    uint32_t offset_alignment_bytes;
};

struct ds_aio_result {
    uint64_t n_done_bytes;
    uint64_t error_offset;
    int32_t error;
    uint32_t fell_back;
};

static int file_out(std::shared_ptr<File> file, ds_aio_file** out, ds_aio_file_facts* facts)
{
    *facts = {file->device(), file->is_direct(), file->is_in_memory(), file->is_regular(), file->memory_alignment(),
              file->offset_alignment()};
    *out = new ds_aio_file{std::move(file)};
    return 0;
}

int ds_aio_file_open(const char* path, int mode, ds_aio_file** out, ds_aio_file_facts* facts)
{
    return guarded([&] { return file_out(File::open(path, static_cast<File::Mode>(mode)), out, facts); });
}

int ds_aio_file_adopt(int fd, ds_aio_file** out, ds_aio_file_facts* facts)
{
    return guarded([&] { return file_out(File::adopt(fd), out, facts); });
}

// The descriptors stay open until the requests on the file are done.
void ds_aio_file_close(ds_aio_file* file) { delete file; }

int ds_aio_engine_open(uint64_t block_bytes, uint32_t queue_depth, uint32_t n_workers, int backend, Engine** out)
{
    return guarded([&] {
        *out = new Engine(block_bytes, queue_depth, n_workers, static_cast<ds_aio::Backend>(backend));
        return 0;
    });
}

// Waits for what is in flight and ends the threads; submitting fails from then on (ESHUTDOWN), and the rest works.
int ds_aio_engine_stop(Engine* engine)
{
    if (is_elsewhere(engine)) { return -ECHILD; }
    engine->stop();
    return 0;
}

// Stops it first. In a forked child nothing is freed: its threads are in the parent, and a lock may be held for ever.
int ds_aio_engine_close(Engine* engine)
{
    if (is_elsewhere(engine)) { return -ECHILD; }
    delete engine;
    return 0;
}

// The memory must stay until ds_aio_wait has returned 0 for this id, or the engine has been closed.
int ds_aio_submit(Engine* engine, ds_aio_file* file, int is_write, uint64_t offset, void* memory, uint64_t n_bytes,
                  uint64_t* id)
{
    if (is_elsewhere(engine)) { return -ECHILD; }
    return guarded([&] {
        *id = engine->submit(file->file, is_write != 0, offset, static_cast<char*>(memory), n_bytes);
        return 0;
    });
}

int ds_aio_wait(Engine* engine, uint64_t id, int64_t timeout_ns, ds_aio_result* result)
{
    if (is_elsewhere(engine)) { return -ECHILD; }
    return guarded([&] {
        ds_aio::Request request;
        const int outcome = engine->wait(id, timeout_ns, &request);
        if (outcome == 0) {
            *result = {request.n_done_bytes, request.error_offset, request.error, request.fell_back};
        }
        return outcome;
    });
}

// After the outcome has been stored, so that an interrupted caller can ask again.
int ds_aio_forget(Engine* engine, uint64_t id)
{
    if (is_elsewhere(engine)) { return -ECHILD; }
    engine->forget(id);
    return 0;
}

int ds_aio_engine_stats(Engine* engine, ds_aio::Stats* stats)
{
    if (is_elsewhere(engine)) { return -ECHILD; }
    *stats = engine->stats();
    return 0;
}

int ds_aio_test_inject(Engine* engine, uint64_t nth, int result)
{
    if (is_elsewhere(engine)) { return -ECHILD; }
    return guarded([&] {
        engine->inject(nth, result);
        return 0;
    });
}

int ds_aio_test_hold(Engine* engine, int is_held)
{
    if (is_elsewhere(engine)) { return -ECHILD; }
    engine->hold(is_held != 0);
    return 0;
}

}  // extern "C"
#pragma GCC visibility pop
