//! Log lines on their way to stderr. One thread writes them, so that a program continues when the reader of
//! its stderr hangs, or the file system behind it is full. Lines for which the queue has no room, or that
//! cannot be written, are counted.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd as _,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::Duration,
};

/// Maximum number of lines that wait.
const MAX_LINES: usize = 4_096;
/// Maximum size of the lines that wait, bytes.
const MAX_BYTES: usize = 4 * 1024 * 1024;
/// How long the end of a program waits for lines that are not written yet.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which the flush checks.
const FLUSH_INTERVAL: Duration = Duration::from_millis(1);

static LOST: LazyLock<Arc<LostLines>> = LazyLock::new(Arc::default);

/// Numbers of log lines that were not written.
#[derive(Debug, Default)]
struct LostLines {
    queue_full: AtomicU64,
    write_failed: AtomicU64,
}

/// Returns the numbers of log lines of this process that were not written, by reason.
#[must_use]
pub fn lost_log_lines() -> [(&'static str, u64); 2] {
    [("queue_full", LOST.queue_full.load(Relaxed)), ("write_failed", LOST.write_failed.load(Relaxed))]
}

/// The lines that wait for the thread that writes them.
#[derive(Debug)]
pub(crate) struct LogQueue {
    lines: SyncSender<Vec<u8>>,
    /// Size of the lines that wait or are being written, bytes.
    waiting: Arc<AtomicUsize>,
    lost: Arc<LostLines>,
}

/// Waits at its end, for at most a second, until the lines so far are written.
#[derive(Debug)]
#[must_use = "lines that wait at the end of the program are lost without it"]
pub struct LogFlush(pub(crate) Arc<LogQueue>);

impl LogQueue {
    /// Starts the thread that writes to stderr.
    pub(crate) fn to_stderr() -> Arc<Self> {
        // Not through the lock of `std::io::stderr`: a write that hangs would hold it, and a panic needs it.
        match io::stderr().as_fd().try_clone_to_owned() {
            Ok(stderr) => Self::start(File::from(stderr), LOST.clone()),
            Err(_) => Self::start(io::stderr(), LOST.clone()),
        }
    }

    fn start(out: impl Write + Send + 'static, lost: Arc<LostLines>) -> Arc<Self> {
        let (lines, to_write) = sync_channel(MAX_LINES);
        let queue = Arc::new(Self { lines, waiting: Arc::default(), lost });
        let (waiting, lost) = (queue.waiting.clone(), queue.lost.clone());
        let thread = std::thread::Builder::new().name("log".to_owned());
        // Without the thread no line has a place, and each is counted.
        let _ = thread.spawn(move || write_lines(&to_write, out, &waiting, &lost));
        queue
    }

    fn flush(&self, timeout: Duration) {
        for _ in 0..timeout.as_millis() / FLUSH_INTERVAL.as_millis() {
            if self.waiting.load(Relaxed) == 0 {
                return;
            }
            std::thread::sleep(FLUSH_INTERVAL);
        }
    }
}

fn write_lines(lines: &Receiver<Vec<u8>>, mut out: impl Write, waiting: &AtomicUsize, lost: &LostLines) {
    while let Ok(line) = lines.recv() {
        if out.write_all(&line).is_err() {
            lost.write_failed.fetch_add(1, Relaxed);
        }
        waiting.fetch_sub(line.len(), Relaxed);
    }
}

/// Takes one whole line with each call, and never waits or fails: the caller serves requests.
impl Write for &LogQueue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let before = self.waiting.fetch_add(line.len(), Relaxed);
        if before + line.len() > MAX_BYTES || self.lines.try_send(line.to_vec()).is_err() {
            self.waiting.fetch_sub(line.len(), Relaxed);
            self.lost.queue_full.fetch_add(1, Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LogFlush {
    fn drop(&mut self) {
        self.0.flush(FLUSH_TIMEOUT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(queue: &LogQueue) -> (u64, u64) {
        (queue.lost.queue_full.load(Relaxed), queue.lost.write_failed.load(Relaxed))
    }

    #[test]
    fn n8_a_log_that_nobody_reads_loses_lines_and_delays_nobody() {
        let (reader, writer) = io::pipe().unwrap();
        let queue = LogQueue::start(writer, Arc::default());
        let line = [b'x'; 1_000];
        // 8 MB: twice what waits.
        for _ in 0..8_000 {
            (&*queue).write_all(&line).unwrap();
        }
        // N8.1
        let waiting = queue.waiting.load(Relaxed);
        assert!(lost(&queue).0 > 3_000 && waiting <= MAX_BYTES, "{:?} {waiting}", lost(&queue));
        // N8.2: the end does not wait for a reader that is stuck.
        queue.flush(Duration::from_millis(50));
        assert!(queue.waiting.load(Relaxed) > 0);
        drop(reader);
        queue.flush(Duration::from_secs(20));
        let (full, failed) = lost(&queue);
        // N8.1: what waited cannot be written any more, and is counted.
        assert!(
            queue.waiting.load(Relaxed) == 0 && failed > 3_000 && full + failed <= 8_000,
            "{full} {failed}"
        );
    }

    #[test]
    fn n8_lines_are_written_in_their_order() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let queue = LogQueue::start(file.reopen().unwrap(), Arc::default());
        for number in 0..100 {
            writeln!(&mut { &*queue }, "{number}").unwrap();
        }
        drop(LogFlush(queue));
        let expected: String = (0..100).map(|number| format!("{number}\n")).collect();
        // N8.2
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), expected);
    }
}
