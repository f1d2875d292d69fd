/* Threads that share the work of one operation. How it is divided changes no bit of a result.
 *
 * A worker that has nothing to do spins for some microseconds, since the next operation is that near, and then sleeps.
 * One operation at a time: the caller takes part in it, and returns when all are done.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "kernels.h"

enum { MAX_THREADS = 256, SPINS = 4000 };

static int64_t size = 1;
static pthread_t workers[MAX_THREADS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;

static atomic_long round_number;
static atomic_long busy;
static atomic_int ending;
static work_fn work;
static void *work_argument;
static int64_t work_count;

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void do_part(int64_t thread)
{
    int64_t first = work_count * thread / size, last = work_count * (thread + 1) / size;
    if (first < last)
        work(work_argument, thread, first, last);
}

static void *serve(void *argument)
{
    int64_t thread = (int64_t)(intptr_t)argument;
    long seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load_explicit(&round_number, memory_order_acquire) == seen; i++)
            relax();
        if (atomic_load_explicit(&round_number, memory_order_acquire) == seen) {
            pthread_mutex_lock(&mutex);
            while (atomic_load(&round_number) == seen)
                pthread_cond_wait(&wake, &mutex);
            pthread_mutex_unlock(&mutex);
        }
        seen++;
        if (atomic_load(&ending))
            return NULL;
        do_part(thread);
        atomic_fetch_sub_explicit(&busy, 1, memory_order_release);
    }
}

static void start_round(void)
{
    pthread_mutex_lock(&mutex);
    atomic_fetch_add_explicit(&round_number, 1, memory_order_release);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&mutex);
}

/* Returns 0, or what pthread_create said; the pool then has the threads that could be made. */
int set_threads(int64_t count)
{
    int error = 0;
    pthread_mutex_lock(&caller);
    if (count > MAX_THREADS)
        count = MAX_THREADS;
    if (count != size) {
        atomic_store(&ending, 1);
        start_round();
        for (int64_t i = 1; i < size; i++)
            pthread_join(workers[i], NULL);
        atomic_store(&ending, 0);
        atomic_store(&round_number, 0);
        for (size = 1; size < count && !error; size += !error)
            error = pthread_create(&workers[size], NULL, serve, (void *)(intptr_t)size);
    }
    pthread_mutex_unlock(&caller);
    return error;
}

int64_t num_threads(void) { return size; }

void parallel(work_fn fn, void *argument, int64_t count)
{
    if (size == 1 || count <= 1) {
        if (count > 0)
            fn(argument, 0, 0, count);
        return;
    }
    pthread_mutex_lock(&caller);
    work = fn, work_argument = argument, work_count = count;
    atomic_store(&busy, size - 1);
    start_round();
    do_part(0);
    for (int i = 1; atomic_load_explicit(&busy, memory_order_acquire); i++)
        if (i % SPINS)
            relax();
        else
            sched_yield(); /* there are fewer cores than threads */
    pthread_mutex_unlock(&caller);
}
