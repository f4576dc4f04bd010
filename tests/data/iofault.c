/* Makes file operations below one directory fail on request, for tests of a storage process.
 *
 * Build:  gcc -shared -fPIC -O1 -o iofault.so iofault.c
 * Use:    LD_PRELOAD=iofault.so program, which calls iofault_attach("/directory", "/control/file") when it is ready
 *
 * The control file holds one `struct control` and is mapped by every process that uses it, so whoever writes
 * to it switches the fault while they run, and reads how many calls were met and how many of them failed.
 * Reads through a memory map are not system calls and are left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The numbers are those of tests/support_faults.py. */
enum mode {
    OFF, ENOSPC_WRITE, EIO_WRITE, SHORT_WRITE, EIO_READ, SHORT_READ, EIO_FSYNC, EXDEV_RENAME,
    EMFILE_OPEN, SLOW, EINVAL_DIRECT_OPEN, EINVAL_DIRECT_IO, EOPNOTSUPP_FALLOCATE,
    EROFS_WRITE
};

struct control {
    _Atomic int32_t mode;
    _Atomic int32_t after;    /* calls of the kind that pass first */
    _Atomic int32_t every;    /* of the rest, each so many-th fails; 1 is all of them */
    _Atomic int32_t delay_ms; /* for SLOW */
    _Atomic int64_t met;
    _Atomic int64_t injected;
};

enum { MAX_FDS = 65536, MAX_BUFFERS = 1024, DIRECT_UNIT = 4096 };
enum { WATCHED = 1, DIRECT = 2 };

static struct control *control;
static char prefix[PATH_MAX];
static _Atomic unsigned char fd_flags[MAX_FDS];

/* Watch the files below a directory that are opened from now on; returns 0, or -1 when the control file is unusable. */
int iofault_attach(const char *directory, const char *control_file)
{
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = real_open(control_file, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -1;
    void *map = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return -1;
    snprintf(prefix, sizeof prefix, "%s", directory);
    control = map;
    return 0;
}

static int mode_is(enum mode mode)
{
    return control && control->mode == (int32_t)mode;
}

/* Whether this call, which is of the kind that `mode` is about, is to fail. */
static int fails(enum mode mode)
{
    if (!mode_is(mode))
        return 0;
    int64_t number = atomic_fetch_add(&control->met, 1);
    int64_t past = number - control->after;
    int32_t every = control->every > 0 ? control->every : 1;
    if (past < 0 || past % every)
        return 0;
    atomic_fetch_add(&control->injected, 1);
    return 1;
}

static int below_prefix(const char *path)
{
    size_t n = strlen(prefix);
    return n && path && !strncmp(path, prefix, n) && (path[n] == '/' || path[n] == 0);
}

static int flags_of(int fd)
{
    return fd >= 0 && fd < MAX_FDS ? fd_flags[fd] : 0;
}

static int target_below(int dir, const char *path)
{
    return path && path[0] != '/' && dir != AT_FDCWD ? flags_of(dir) & WATCHED : below_prefix(path);
}

/* What the kernel says the descriptor leads to decides, so relative names count as well. */
static int note(int fd, int flags)
{
    char link[32], target[PATH_MAX];
    if (fd < 0 || fd >= MAX_FDS)
        return fd;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, target, sizeof target - 1);
    target[n > 0 ? n : 0] = 0;
    fd_flags[fd] = below_prefix(target) ? (flags & O_DIRECT ? WATCHED | DIRECT : WATCHED) : 0;
    return fd;
}

static int refuses_open(int below, int flags)
{
    int saved = errno;
    if (below && fails(EMFILE_OPEN))
        return errno = EMFILE, 1;
    if (below && (flags & (O_ACCMODE | O_CREAT)) && fails(EROFS_WRITE))
        return errno = EROFS, 1;
    if (below && (flags & O_DIRECT) && fails(EINVAL_DIRECT_OPEN))
        return errno = EINVAL, 1;
    errno = saved;
    return 0;
}

static void delay(int fd)
{
    if ((flags_of(fd) & WATCHED) && fails(SLOW)) {
        int32_t ms = control->delay_ms;
        struct timespec pause = {ms / 1000, (ms % 1000) * 1000000L};
        nanosleep(&pause, NULL);
    }
}

/* The errno with which a transfer fails, or 0. */
static int transfer_error(int fd, int writing)
{
    int flags = flags_of(fd);
    if (!(flags & WATCHED) || !control)
        return 0;
    delay(fd);
    if ((flags & DIRECT) && fails(EINVAL_DIRECT_IO))
        return EINVAL;
    if (writing && fails(ENOSPC_WRITE))
        return ENOSPC;
    if (writing && fails(EROFS_WRITE))
        return EROFS;
    return fails(writing ? EIO_WRITE : EIO_READ) ? EIO : 0;
}

/* How many of `n` bytes a transfer gets to move. */
static size_t allowed(int fd, size_t n, int writing)
{
    int flags = flags_of(fd);
    size_t unit = flags & DIRECT ? DIRECT_UNIT : 1;
    if (!(flags & WATCHED) || n < 2 * unit || !fails(writing ? SHORT_WRITE : SHORT_READ))
        return n;
    return n / 2 / unit * unit;
}

static size_t total(const struct iovec *buffers, int count)
{
    size_t n = 0;
    for (int i = 0; i < count; i++)
        n += buffers[i].iov_len;
    return n;
}

/* Copy the buffers that cover the first `n` bytes; returns how many there are. */
static int cut(struct iovec *to, const struct iovec *from, int count, size_t n)
{
    int used = 0;
    for (; used < count && used < MAX_BUFFERS && n; used++) {
        to[used] = from[used];
        if (to[used].iov_len > n)
            to[used].iov_len = n;
        n -= to[used].iov_len;
    }
    return used;
}

#define REAL(name) (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPEN(name)                                                                        \
    int name(const char *path, int flags, ...)                                            \
    {                                                                                     \
        va_list args;                                                                     \
        va_start(args, flags);                                                            \
        mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;           \
        va_end(args);                                                                     \
        return refuses_open(below_prefix(path), flags) ? -1 : note((REAL(name))(path, flags, bits), flags); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                      \
    int name(int dir, const char *path, int flags, ...)                                   \
    {                                                                                     \
        va_list args;                                                                     \
        va_start(args, flags);                                                            \
        mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;           \
        va_end(args);                                                                     \
        return refuses_open(target_below(dir, path), flags) ? -1                          \
                                                            : note((REAL(name))(dir, path, flags, bits), flags); \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int fd)
{
    if (fd >= 0 && fd < MAX_FDS)
        fd_flags[fd] = 0;
    return (REAL(close))(fd);
}

#define FLAT(name, constness, writing, params, ...)                                       \
    ssize_t name(int fd, constness void *data, size_t n params)                           \
    {                                                                                     \
        int error = transfer_error(fd, writing);                                          \
        if (error)                                                                        \
            return errno = error, -1;                                                     \
        return (REAL(name))(fd, data, allowed(fd, n, writing) __VA_ARGS__);               \
    }
#define COMMA ,
FLAT(read, , 0, , )
FLAT(write, const, 1, , )
FLAT(pread, , 0, COMMA off_t at, COMMA at)
FLAT(pread64, , 0, COMMA off64_t at, COMMA at)
FLAT(pwrite, const, 1, COMMA off_t at, COMMA at)
FLAT(pwrite64, const, 1, COMMA off64_t at, COMMA at)

#define GATHER(name, writing, params, ...)                                                \
    ssize_t name(int fd, const struct iovec *buffers, int count params)                   \
    {                                                                                     \
        struct iovec part[MAX_BUFFERS];                                                   \
        int error = transfer_error(fd, writing);                                          \
        if (error)                                                                        \
            return errno = error, -1;                                                     \
        size_t n = total(buffers, count), move = allowed(fd, n, writing);                 \
        if (move < n) {                                                                   \
            count = cut(part, buffers, count, move);                                      \
            buffers = part;                                                               \
        }                                                                                 \
        return (REAL(name))(fd, buffers, count __VA_ARGS__);                              \
    }
GATHER(readv, 0, , )
GATHER(writev, 1, , )
GATHER(preadv, 0, COMMA off_t at, COMMA at)
GATHER(preadv64, 0, COMMA off64_t at, COMMA at)
GATHER(pwritev, 1, COMMA off_t at, COMMA at)
GATHER(pwritev64, 1, COMMA off64_t at, COMMA at)
GATHER(preadv2, 0, COMMA off_t at COMMA int how, COMMA at COMMA how)
GATHER(preadv64v2, 0, COMMA off64_t at COMMA int how, COMMA at COMMA how)
GATHER(pwritev2, 1, COMMA off_t at COMMA int how, COMMA at COMMA how)
GATHER(pwritev64v2, 1, COMMA off64_t at COMMA int how, COMMA at COMMA how)

#define SYNC(name)                                                                        \
    int name(int fd)                                                                      \
    {                                                                                     \
        delay(fd);                                                                        \
        if ((flags_of(fd) & WATCHED) && fails(EIO_FSYNC))                                 \
            return errno = EIO, -1;                                                       \
        return (REAL(name))(fd);                                                          \
    }
SYNC(fsync)
SYNC(fdatasync)

static int room_error(int fd)
{
    if (!(flags_of(fd) & WATCHED))
        return 0;
    if (fails(ENOSPC_WRITE))
        return ENOSPC;
    if (fails(EROFS_WRITE))
        return EROFS;
    return fails(EOPNOTSUPP_FALLOCATE) ? EOPNOTSUPP : 0;
}

#define ROOM(name, offset)                                                                \
    int name(int fd, int how, offset at, offset n)                                        \
    {                                                                                     \
        int error = room_error(fd);                                                       \
        return error ? (errno = error, -1) : (REAL(name))(fd, how, at, n);                \
    }
ROOM(fallocate, off_t)
ROOM(fallocate64, off64_t)

#define POSIX_ROOM(name, offset) /* returns the error instead of setting errno */         \
    int name(int fd, offset at, offset n)                                                 \
    {                                                                                     \
        int error = room_error(fd);                                                       \
        return error ? error : (REAL(name))(fd, at, n);                                   \
    }
POSIX_ROOM(posix_fallocate, off_t)
POSIX_ROOM(posix_fallocate64, off64_t)

#define LENGTH(name, offset)                                                              \
    int name(int fd, offset n)                                                            \
    {                                                                                     \
        if ((flags_of(fd) & WATCHED) && fails(EIO_WRITE))                                 \
            return errno = EIO, -1;                                                       \
        return (REAL(name))(fd, n);                                                       \
    }
LENGTH(ftruncate, off_t)
LENGTH(ftruncate64, off64_t)

static int refuses_move(int below)
{
    int saved = errno;
    if (below && fails(EXDEV_RENAME))
        return errno = EXDEV, 1;
    errno = saved;
    return 0;
}

int rename(const char *from, const char *to)
{
    return refuses_move(below_prefix(to)) ? -1 : (REAL(rename))(from, to);
}

int renameat(int from_dir, const char *from, int to_dir, const char *to)
{
    return refuses_move(target_below(to_dir, to)) ? -1 : (REAL(renameat))(from_dir, from, to_dir, to);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned int how)
{
    return refuses_move(target_below(to_dir, to)) ? -1 : (REAL(renameat2))(from_dir, from, to_dir, to, how);
}

int link(const char *from, const char *to)
{
    return refuses_move(below_prefix(to)) ? -1 : (REAL(link))(from, to);
}

int linkat(int from_dir, const char *from, int to_dir, const char *to, int how)
{
    return refuses_move(target_below(to_dir, to)) ? -1 : (REAL(linkat))(from_dir, from, to_dir, to, how);
}
