/* Threads that share one job at a time. One caller thread only. */
#ifndef SS_POOL_H
#define SS_POOL_H

typedef void (*chunk_fn)(void *job, int chunk);

/* Run fn(job, 0) .. fn(job, num_chunks - 1), each once, on the caller and the workers; return when all are done. */
void pool_run(chunk_fn fn, void *job, int num_chunks);
int pool_threads(void);
/* Scratch memory of the calling pool thread: at least `bytes`, 64-byte aligned, contents lost at the next call. */
void *pool_scratch(unsigned long bytes);

#endif
