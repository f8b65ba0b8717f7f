/* Loaded ahead of a program (LD_PRELOAD), this makes the files it maps come in as they are touched and not before.
 *
 * The newest ik_llama.cpp has an option for that, which the release that can be fetched lacks: without it, the whole
 * file is read when it is mapped, pushed out again where memory is bounded, and read once more when it is used. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/types.h>

typedef void *mapper(void *, size_t, int, int, int, off_t);

void *mmap(void *address, size_t length, int protection, int flags, int file, off_t offset) {
    mapper *next = (mapper *)dlsym(RTLD_NEXT, "mmap");
    return next(address, length, protection, file < 0 ? flags : flags & ~MAP_POPULATE, file, offset);
}

int posix_madvise(void *address, size_t length, int advice) {
    int (*next)(void *, size_t, int) = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "posix_madvise");
    return advice == POSIX_MADV_WILLNEED ? 0 : next(address, length, advice);
}
