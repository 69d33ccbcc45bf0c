/* Loaded before libc: counts the file operations of a program under one folder, and at the n-th one fails it or ends the
 * process, as a full or broken disk and `kill -9` do. Compiled by mod.rs, which explains the variables.
 *
 *   TORTURE_ROOT   the folder
 *   TORTURE_FAULT  KIND:N; kill, torn, enospc, eio, erofs, emfile, eintr fail the n-th operation that they can meet;
 *                  full fails all from there on that need space
 *   TORTURE_LOG    a file that gets a line for every operation: its name, the path and the start of what is written
 *   TORTURE_MET    a file that is made when an operation is failed
 *   TORTURE_THREADS    how many threads can be made
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *root, *kind;
static size_t root_length;
static long at;
static int log_fd = -1;
static atomic_long count;

__attribute__((constructor)) static void begin(void) {
    static char name[32];
    const char *fault = getenv("TORTURE_FAULT"), *log = getenv("TORTURE_LOG");
    root = getenv("TORTURE_ROOT");
    root_length = root ? strlen(root) : 0;
    if (fault && sscanf(fault, "%31[a-z]:%ld", name, &at) == 2) kind = name;
    if (log) log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int is_kind(const char *name) { return kind && !strcmp(kind, name); }

static int is_under(const char *path) {
    return root && path && !strncmp(path, root, root_length) &&
           (path[root_length] == '/' || path[root_length] == 0);
}

/* The path of a handle, or of a name within it. */
static int path_of(int fd, const char *name, char *out, size_t size) {
    if (name && (name[0] == '/' || fd == AT_FDCWD)) return snprintf(out, size, "%s", name), 1;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, size - 1);
    if (n < 0) return 0;
    out[n] = 0;
    if (name) snprintf(out + n, size - n, "/%s", name);
    return 1;
}

static void note(const char *operation, const char *path, const void *bytes, size_t length) {
    if (log_fd < 0) return;
    char line[4400], start[49] = "";
    size_t n = length < 48 ? length : 48;
    for (size_t i = 0; i < n; i++) {
        char c = ((const char *)bytes)[i];
        start[i] = c < 32 || c > 126 ? '.' : c;
    }
    int size = snprintf(line, sizeof line, "%s\t%s\t%s\n", operation, path + root_length, start);
    syscall(SYS_write, log_fd, line, size);
}

enum { TEAR = -1, KILL = -2 };
enum { NEEDS_SPACE = 1, CHANGES = 2, OPENS = 4, RESTARTS = 8, WRITES = 16 };

/* Of an operation that fails. */
static int met(int error) {
    const char *path = getenv("TORTURE_MET");
    int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) syscall(SYS_close, fd);
    if (error == KILL) syscall(SYS_kill, getpid(), SIGKILL);
    return error;
}

/* Whether an operation fails, and how: 0 not at all, TEAR half-way, else errno. */
static int meets(const char *operation, int traits, const char *path, const void *bytes, size_t length) {
    if (!is_under(path)) return 0;
    long n = ++count;
    note(operation, path, bytes, length);
    if (!kind) return 0;
    if (is_kind("full")) return n >= at && traits & NEEDS_SPACE ? met(ENOSPC) : 0;
    if (n != at) return 0;
    if (is_kind("kill")) return met(KILL);
    if (is_kind("torn")) return met(traits & WRITES ? TEAR : KILL);
    if (is_kind("enospc")) return traits & NEEDS_SPACE ? met(ENOSPC) : 0;
    if (is_kind("erofs")) return traits & CHANGES ? met(EROFS) : 0;
    if (is_kind("emfile")) return traits & OPENS ? met(EMFILE) : 0;
    if (is_kind("eintr")) return traits & RESTARTS ? met(EINTR) : 0;
    return is_kind("eio") ? met(EIO) : 0;
}

static int meets_at(const char *operation, int traits, int fd, const char *name, const void *bytes, size_t length) {
    char path[4200];
    if (!root || !path_of(fd, name, path, sizeof path)) return 0;
    return meets(operation, traits, path, bytes, length);
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

#define FAIL_IF(call)                  \
    do {                               \
        int error = (call);            \
        if (error) return errno = error, -1; \
    } while (0)

static const char *open_name(int flags) { return flags & O_CREAT ? "create" : "open"; }

static int open_traits(int flags) {
    int writes = (flags & O_ACCMODE) != O_RDONLY;
    return OPENS | RESTARTS | (flags & O_CREAT ? NEEDS_SPACE : 0) | (writes ? CHANGES : 0);
}

#define MODE(flags)                                    \
    mode_t mode = 0;                                   \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {           \
        va_list more;                                  \
        va_start(more, flags);                         \
        mode = va_arg(more, mode_t);                   \
        va_end(more);                                  \
    }

int open(const char *path, int flags, ...) {
    MODE(flags)
    FAIL_IF(meets_at(open_name(flags), open_traits(flags), AT_FDCWD, path, "", 0));
    return REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    FAIL_IF(meets_at(open_name(flags), open_traits(flags), AT_FDCWD, path, "", 0));
    return REAL(open64)(path, flags, mode);
}
int openat(int fd, const char *path, int flags, ...) {
    MODE(flags)
    FAIL_IF(meets_at(open_name(flags), open_traits(flags), fd, path, "", 0));
    return REAL(openat)(fd, path, flags, mode);
}
int openat64(int fd, const char *path, int flags, ...) {
    MODE(flags)
    FAIL_IF(meets_at(open_name(flags), open_traits(flags), fd, path, "", 0));
    return REAL(openat64)(fd, path, flags, mode);
}

/* Half of the bytes are there when the process ends. */
#define WRITE(name, half)                                                                   \
    int error = meets_at("write", WRITES | NEEDS_SPACE | CHANGES | RESTARTS, fd, 0, bytes, n); \
    if (error == TEAR) {                                                                     \
        half;                                                                               \
        syscall(SYS_kill, getpid(), SIGKILL);                                               \
    }                                                                                       \
    if (error) return errno = error, -1

ssize_t write(int fd, const void *bytes, size_t n) {
    WRITE(write, REAL(write)(fd, bytes, n / 2));
    return REAL(write)(fd, bytes, n);
}
ssize_t pwrite64(int fd, const void *bytes, size_t n, off64_t offset) {
    WRITE(pwrite64, REAL(pwrite64)(fd, bytes, n / 2, offset));
    return REAL(pwrite64)(fd, bytes, n, offset);
}
ssize_t read(int fd, void *bytes, size_t n) {
    FAIL_IF(meets_at("read", RESTARTS, fd, 0, "", 0));
    return REAL(read)(fd, bytes, n);
}
ssize_t pread64(int fd, void *bytes, size_t n, off64_t offset) {
    FAIL_IF(meets_at("read", RESTARTS, fd, 0, "", 0));
    return REAL(pread64)(fd, bytes, n, offset);
}
int fsync(int fd) {
    FAIL_IF(meets_at("sync", NEEDS_SPACE | RESTARTS, fd, 0, "", 0));
    return REAL(fsync)(fd);
}
int fdatasync(int fd) {
    FAIL_IF(meets_at("sync", NEEDS_SPACE | RESTARTS, fd, 0, "", 0));
    return REAL(fdatasync)(fd);
}
int ftruncate64(int fd, off64_t size) {
    FAIL_IF(meets_at("truncate", CHANGES | RESTARTS, fd, 0, "", 0));
    return REAL(ftruncate64)(fd, size);
}
int rename(const char *from, const char *to) {
    FAIL_IF(meets_at("rename", NEEDS_SPACE | CHANGES, AT_FDCWD, to, "", 0));
    return REAL(rename)(from, to);
}
int unlink(const char *path) {
    FAIL_IF(meets_at("remove", CHANGES, AT_FDCWD, path, "", 0));
    return REAL(unlink)(path);
}
int unlinkat(int fd, const char *path, int flags) {
    FAIL_IF(meets_at("remove", CHANGES, fd, path, "", 0));
    return REAL(unlinkat)(fd, path, flags);
}
int rmdir(const char *path) {
    FAIL_IF(meets_at("remove", CHANGES, AT_FDCWD, path, "", 0));
    return REAL(rmdir)(path);
}
int mkdir(const char *path, mode_t mode) {
    FAIL_IF(meets_at("mkdir", NEEDS_SPACE | CHANGES, AT_FDCWD, path, "", 0));
    return REAL(mkdir)(path, mode);
}
int fchmod(int fd, mode_t mode) {
    FAIL_IF(meets_at("chmod", CHANGES, fd, 0, "", 0));
    return REAL(fchmod)(fd, mode);
}

/* From the limit on the system has no more threads, as where `ulimit -u` is reached. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    static atomic_long made;
    const char *most = getenv("TORTURE_THREADS");
    if (most && ++made > atol(most)) return EAGAIN;
    return REAL(pthread_create)(thread, attributes, start, argument);
}
