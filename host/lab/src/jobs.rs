//! Runs jobs on a bounded number of threads.

use std::{
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

/// Runs the jobs 0 to `count` in order on `threads` threads. Passes each result to `done` on the caller's
/// thread as soon as the job ends. Starts no further job after an error.
///
/// # Errors
/// The first error of a job.
pub(crate) fn run_jobs<T: Send, E: Send>(
    count: usize,
    threads: usize,
    work: impl Fn(usize) -> Result<T, E> + Sync,
    mut done: impl FnMut(usize, T),
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let (results, received) = mpsc::channel();
    let mut first_error = None;
    thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            let results = results.clone();
            let (work, next) = (&work, &next);
            scope.spawn(move || {
                loop {
                    let job = next.fetch_add(1, Ordering::Relaxed);
                    if job >= count {
                        return;
                    }
                    let result = work(job);
                    if result.is_err() {
                        next.store(count, Ordering::Relaxed);
                    }
                    if results.send((job, result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(results);
        for (job, result) in received {
            match result {
                Ok(result) => done(job, result),
                Err(error) => first_error = first_error.take().or(Some(error)),
            }
        }
    });
    first_error.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_runs_once_and_an_error_ends_the_rest() {
        let mut seen = vec![0; 20];
        let run = run_jobs(20, 3, Ok::<usize, ()>, |job, result| {
            assert_eq!(job, result);
            seen[job] += 1;
        });
        assert_eq!((run, seen), (Ok(()), vec![1; 20]));
        let mut over = 0;
        let run = run_jobs(1_000, 1, |job| if job == 3 { Err("job 3") } else { Ok(()) }, |_, ()| over += 1);
        assert_eq!((run, over), (Err("job 3"), 3));
    }
}
