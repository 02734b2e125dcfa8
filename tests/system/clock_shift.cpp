// For LD_PRELOAD: the time of day of a process, set off by what the file CLOCK_SHIFT_FILE holds now (int64, nanoseconds).
// The kernel's clocks are as they were: CLOCK_MONOTONIC is untouched, as in a real jump.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <ctime>

static const volatile int64_t *mapped() {
    static const int64_t none = 0;
    const char *path = getenv("CLOCK_SHIFT_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return &none;
    void *at = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    return at == MAP_FAILED ? &none : static_cast<const volatile int64_t *>(at);
}

static int64_t shift_ns() {
    static const volatile int64_t *shift = mapped();
    return *shift;
}

static constexpr int64_t SECOND = 1000000000;

extern "C" {

int clock_gettime(clockid_t clock, struct timespec *now) noexcept {
    int status = static_cast<int>(syscall(SYS_clock_gettime, clock, now));
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_sec * SECOND + now->tv_nsec + shift_ns();
        now->tv_sec = ns / SECOND;
        now->tv_nsec = ns % SECOND;
    }
    return status;
}

int gettimeofday(struct timeval *now, void *) noexcept {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) noexcept {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}
}
