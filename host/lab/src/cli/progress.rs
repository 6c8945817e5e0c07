//! Shows progress on standard error, and stops the runs on Ctrl-C.

use std::{
    io::{IsTerminal as _, Write as _},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use crate::monitor::Monitor;

/// Returns how much is done so far.
type Done = dyn Fn() -> u64 + Send;

/// Exit code of a command that SIGINT ended: 128 plus the number of the signal.
pub(super) const INTERRUPTED: u8 = 130;
/// Interval at which the bar on a terminal is drawn.
const BAR_INTERVAL: Duration = Duration::from_millis(200);
/// Interval at which a line is written if there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows how much of some work is done: as a bar on a terminal, otherwise as a line now and then.
#[derive(Debug)]
pub(super) struct Progress {
    /// Dropped when the work has ended.
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Starts to show the progress of the runs, which have `total` requests together.
    pub(super) fn of_runs(monitor: Arc<Monitor>, total: u64, name: String) -> Self {
        Self::start(move || monitor.requests(), total, name, "requests in all runs")
    }

    /// Starts to show how much of `total` is done; `unit` says of what.
    pub(super) fn start(
        done: impl Fn() -> u64 + Send + 'static,
        total: u64,
        name: String,
        unit: &'static str,
    ) -> Self {
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            if std::io::stderr().is_terminal() {
                bar(&done, total, name, unit, &ended);
            } else {
                lines(&done, total, &name, unit, &ended);
            }
        });
        Self { end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits for an interval. Returns whether the work is still going on.
fn wait(ended: &mpsc::Receiver<()>, interval: Duration) -> bool {
    ended.recv_timeout(interval) == Err(mpsc::RecvTimeoutError::Timeout)
}

fn bar(done: &Done, total: u64, name: String, unit: &str, ended: &mpsc::Receiver<()>) {
    let style = ProgressStyle::with_template(&format!(
        "{{msg}} [{{bar:40}}] {{percent}} % of {{len}} {unit} ({{elapsed}}, {{eta}} left)"
    ));
    let bar = ProgressBar::new(total).with_message(name);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    while wait(ended, BAR_INTERVAL) {
        bar.set_position(done().min(total));
    }
    bar.finish_and_clear();
}

fn lines(done: &Done, total: u64, name: &str, unit: &str, ended: &mpsc::Receiver<()>) {
    let begun = Instant::now();
    while wait(ended, LINE_INTERVAL) {
        let over = done().min(total);
        let (percent, elapsed) = (over.saturating_mul(100) / total.max(1), begun.elapsed().as_secs());
        // Below 1 %, the time that is left is a guess.
        let left = elapsed.saturating_mul(total - over) / over.max(1);
        let left = if percent > 0 { format!(", about {left} s left") } else { String::new() };
        let _ = writeln!(std::io::stderr(), "{name}: {percent} % of {total} {unit}; {elapsed} s{left}");
    }
}

/// Stops the runs at the first Ctrl-C, and the process at the second.
pub(super) fn stop_on_interrupt(monitor: Arc<Monitor>) {
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
        runtime.block_on(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                if monitor.is_stopped() {
                    std::process::exit(i32::from(INTERRUPTED));
                }
                monitor.stop();
                let _ = writeln!(std::io::stderr(), "interrupted: the runs end; again to end at once");
            }
        });
    });
}
