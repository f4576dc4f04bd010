/* Writes down what a process does to the files below one directory, in order, for a model of power cuts.
 *
 * Build:  gcc -shared -fPIC -O1 -o power_recorder.so power_recorder.c
 * Use:    LD_PRELOAD=power_recorder.so program, which calls power_attach("/directory", "/log") when it is ready
 *
 * Calls that change files run one at a time, and are written down before they return.  So whatever stands in the log
 * before a sync had ended before that sync began: the sync covers it.  Marks of the program stand between them.
 * Memory maps are left alone: liblmdb writes its data file with system calls, and its lock file means nothing later.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* The numbers are those of power_model.py. */
enum kind { WRITE = 1, SYNC, SIZE, ROOM, CREATE, LINK, UNLINK, RENAME, MKDIR, TIME, MARK };

struct event {
    uint32_t kind, path_bytes, data_bytes, zero;
    uint64_t inode;
    int64_t a, b;
};

enum { MAX_FDS = 65536 };

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char prefix[PATH_MAX];
static int log_fd = -1;
static ino_t inodes[MAX_FDS];
static unsigned char synced[MAX_FDS];

#define REAL(name) (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void record(enum kind kind, ino_t inode, int64_t a, int64_t b, const char *path, const struct iovec *data, int count, size_t n)
{
    struct event event = {kind, path ? strlen(path) : 0, n, 0, inode, a, b};
    struct iovec parts[2] = {{&event, sizeof event}, {(void *)path, event.path_bytes}};
    ssize_t (*put)(int, const struct iovec *, int) = REAL(writev);
    if (put(log_fd, parts, 2) < 0)
        _exit(97);
    for (int i = 0; i < count && n; i++) { /* one by one: a log that is short would be found out by its reader */
        size_t part = data[i].iov_len < n ? data[i].iov_len : n;
        ssize_t (*flat)(int, const void *, size_t) = REAL(write);
        for (size_t done = 0; done < part;) {
            ssize_t moved = flat(log_fd, (char *)data[i].iov_base + done, part - done);
            if (moved <= 0)
                _exit(97);
            done += moved;
        }
        n -= part;
    }
}

/* Record what happens below a directory from now on; returns 0, or -1 when the log cannot be written. */
int power_attach(const char *directory, const char *log)
{
    int (*real_open)(const char *, int, ...) = REAL(open);
    log_fd = real_open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    snprintf(prefix, sizeof prefix, "%s", directory);
    return log_fd < 0 ? -1 : 0;
}

/* Put a word of the program into the log: it stands behind all that had ended before. */
void power_mark(const char *text)
{
    pthread_mutex_lock(&turn);
    record(MARK, 0, 0, 0, text, NULL, 0, 0);
    pthread_mutex_unlock(&turn);
}

static int below(const char *path)
{
    size_t n = strlen(prefix);
    return log_fd >= 0 && path && !strncmp(path, prefix, n) && (path[n] == '/' || path[n] == 0);
}

static ino_t inode_of(int fd)
{
    return log_fd >= 0 && fd >= 0 && fd < MAX_FDS ? inodes[fd] : 0;
}

static ino_t inode_at(const char *path)
{
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

static int opened(int fd, const char *path, int flags, int was_there)
{
    if (fd < 0 || fd >= MAX_FDS)
        return fd;
    struct stat found;
    fstat(fd, &found);
    inodes[fd] = found.st_ino;
    synced[fd] = (flags & (O_DSYNC | O_SYNC)) != 0;
    if (!was_there)
        record(CREATE, found.st_ino, 0, 0, path, NULL, 0, 0);
    else if (flags & O_TRUNC)
        record(SIZE, found.st_ino, 0, 0, NULL, NULL, 0, 0);
    return fd;
}

#define OPEN(name)                                                                                    \
    int name(const char *path, int flags, ...)                                                        \
    {                                                                                                 \
        va_list args;                                                                                 \
        va_start(args, flags);                                                                        \
        mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;                       \
        va_end(args);                                                                                 \
        if (!below(path))                                                                             \
            return (REAL(name))(path, flags, bits);                                                   \
        pthread_mutex_lock(&turn);                                                                    \
        int there = inode_at(path) != 0;                                                              \
        int fd = opened((REAL(name))(path, flags, bits), path, flags, there);                         \
        pthread_mutex_unlock(&turn);                                                                  \
        return fd;                                                                                    \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                  \
    int name(int dir, const char *path, int flags, ...)                                               \
    {                                                                                                 \
        va_list args;                                                                                 \
        va_start(args, flags);                                                                        \
        mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;                       \
        va_end(args);                                                                                 \
        if (!below(path))                                                                             \
            return (REAL(name))(dir, path, flags, bits);                                              \
        pthread_mutex_lock(&turn);                                                                    \
        int there = inode_at(path) != 0;                                                              \
        int fd = opened((REAL(name))(dir, path, flags, bits), path, flags, there);                    \
        pthread_mutex_unlock(&turn);                                                                  \
        return fd;                                                                                    \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int fd)
{
    if (fd >= 0 && fd < MAX_FDS)
        inodes[fd] = 0;
    return (REAL(close))(fd);
}

static void wrote(int fd, ino_t inode, int64_t at, const struct iovec *data, int count, ssize_t n)
{
    if (n > 0)
        record(WRITE, inode, at, 0, NULL, data, count, n);
    if (n > 0 && synced[fd])
        record(SYNC, inode, 0, 0, NULL, NULL, 0, 0);
}

#define RECORDED(call, at, data, count)                                                               \
    ino_t inode = inode_of(fd);                                                                       \
    if (!inode)                                                                                       \
        return call;                                                                                  \
    pthread_mutex_lock(&turn);                                                                        \
    ssize_t n = call;                                                                                 \
    wrote(fd, inode, at, data, count, n);                                                             \
    pthread_mutex_unlock(&turn);                                                                      \
    return n;

#define ONE &(struct iovec){(void *)data, size}
#define BEFORE lseek(fd, 0, SEEK_CUR) - n

ssize_t write(int fd, const void *data, size_t size) { RECORDED((REAL(write))(fd, data, size), BEFORE, ONE, 1) }
ssize_t writev(int fd, const struct iovec *v, int c) { RECORDED((REAL(writev))(fd, v, c), BEFORE, v, c) }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    RECORDED((REAL(pwrite))(fd, data, size, at), at, ONE, 1)
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    RECORDED((REAL(pwrite64))(fd, data, size, at), at, ONE, 1)
}
ssize_t pwritev(int fd, const struct iovec *v, int c, off_t at) { RECORDED((REAL(pwritev))(fd, v, c, at), at, v, c) }
ssize_t pwritev64(int fd, const struct iovec *v, int c, off64_t at) { RECORDED((REAL(pwritev64))(fd, v, c, at), at, v, c) }
ssize_t pwritev2(int fd, const struct iovec *v, int c, off_t at, int how)
{
    RECORDED((REAL(pwritev2))(fd, v, c, at, how), at, v, c)
}
ssize_t pwritev64v2(int fd, const struct iovec *v, int c, off64_t at, int how)
{
    RECORDED((REAL(pwritev64v2))(fd, v, c, at, how), at, v, c)
}

#define AFTER(good, call, ...)                                                                        \
    pthread_mutex_lock(&turn);                                                                        \
    int result = call;                                                                                \
    if (good)                                                                                         \
        record(__VA_ARGS__, NULL, 0, 0);                                                              \
    pthread_mutex_unlock(&turn);                                                                      \
    return result;

#define ON_FD(name, params, args, kind, a, b)                                                         \
    int name params                                                                                   \
    {                                                                                                 \
        ino_t inode = inode_of(fd);                                                                   \
        if (!inode)                                                                                   \
            return (REAL(name)) args;                                                                 \
        AFTER(result == 0, (REAL(name)) args, kind, inode, a, b, NULL)                                \
    }
ON_FD(fsync, (int fd), (fd), SYNC, 0, 0)
ON_FD(fdatasync, (int fd), (fd), SYNC, 0, 0)
ON_FD(ftruncate, (int fd, off_t size), (fd, size), SIZE, size, 0)
ON_FD(ftruncate64, (int fd, off64_t size), (fd, size), SIZE, size, 0)
ON_FD(posix_fallocate, (int fd, off_t at, off_t n), (fd, at, n), ROOM, at, n)
ON_FD(posix_fallocate64, (int fd, off64_t at, off64_t n), (fd, at, n), ROOM, at, n)

#define ON_PATH(name, params, args, kind, inode, data)                                                \
    int name params                                                                                   \
    {                                                                                                 \
        if (!below(path))                                                                             \
            return (REAL(name)) args;                                                                 \
        AFTER(result == 0, (REAL(name)) args, kind, inode, 0, 0, path)                                \
    }
ON_PATH(unlink, (const char *path), (path), UNLINK, 0, 0)
ON_PATH(rmdir, (const char *path), (path), UNLINK, 0, 0)
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), MKDIR, inode_at(path), 0)
ON_PATH(link, (const char *from, const char *path), (from, path), LINK, inode_at(path), 0)
ON_PATH(rename, (const char *from, const char *path), (from, path), RENAME, inode_at(path), 0)

int utimensat(int dir, const char *path, const struct timespec times[2], int flags)
{
    if (!below(path))
        return (REAL(utimensat))(dir, path, times, flags);
    AFTER(result == 0, (REAL(utimensat))(dir, path, times, flags), TIME, inode_at(path), times[1].tv_sec, times[1].tv_nsec, NULL)
}
