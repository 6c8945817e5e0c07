//! The maintenance thread: rebuilds and drops stores, so that no request pays for another one's trap.

use std::{io, sync::mpsc, thread, time::Duration};

use tokio::time::Instant;

/// Work for the maintenance thread.
pub(crate) type Chore = Box<dyn FnOnce() + Send>;

/// Hands work to the thread, which ends with this value.
pub(crate) struct Chores(mpsc::Sender<(Duration, Chore)>);

impl Chores {
    pub(crate) fn start() -> io::Result<Self> {
        let (sender, work) = mpsc::channel();
        thread::Builder::new().name("pointsman-chores".to_owned()).spawn(move || run(&work))?;
        Ok(Self(sender))
    }

    /// Runs `chore` after `delay`.
    pub(crate) fn push(&self, delay: Duration, chore: Chore) {
        // The thread reads the clock, because that of the caller's runtime may be paused. It ends with this
        // sender only.
        let _ = self.0.send((delay, chore));
    }
}

fn run(work: &mpsc::Receiver<(Duration, Chore)>) {
    // Chores with a delay are rare: a few that are tried again.
    let mut delayed: Vec<(Instant, Chore)> = Vec::new();
    loop {
        let now = Instant::now();
        while let Some(place) = delayed.iter().position(|(due, _)| *due <= now) {
            let (_, chore) = delayed.swap_remove(place);
            chore();
        }
        let next = delayed.iter().map(|(due, _)| *due).min();
        let received = match next {
            Some(due) => work.recv_timeout(due.saturating_duration_since(now)),
            None => work.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
        };
        match received {
            Ok((Duration::ZERO, chore)) => chore(),
            Ok((delay, chore)) => delayed.push((Instant::now() + delay, chore)),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chore_with_a_delay_holds_up_no_other() {
        let chores = Chores::start().expect("a thread");
        let (done, order) = mpsc::channel();
        for (name, delay) in [("late", 60), ("at once", 0), ("soon", 20)] {
            let done = done.clone();
            let chore = move || done.send(name).expect("it is awaited");
            chores.push(Duration::from_millis(delay), Box::new(chore));
        }
        let seen: Vec<_> =
            (0..3).map(|_| order.recv_timeout(Duration::from_secs(10)).expect("done")).collect();
        assert_eq!(seen, ["at once", "soon", "late"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_chore_of_a_runtime_with_a_paused_clock_runs_in_real_time() {
        let chores = Chores::start().expect("a thread");
        tokio::time::advance(Duration::from_secs(3_600)).await;
        let (done, order) = mpsc::channel();
        for delay in [0, 20] {
            let done = done.clone();
            let chore = move || done.send(delay).expect("it is awaited");
            chores.push(Duration::from_millis(delay), Box::new(chore));
            assert_eq!(order.recv_timeout(Duration::from_secs(10)), Ok(delay));
        }
    }
}
