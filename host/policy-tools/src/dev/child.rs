//! Runs a command of this program as a process, with a deadline. The process and those that it starts form a
//! group, which is ended at the deadline, or when the session no longer waits for it.

use std::{ffi::OsString, io, path::Path, process::Stdio, time::Duration};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::{Child, Command},
    time::{Instant, sleep_until},
};

/// Bytes of a stream that are kept, from its beginning; the rest is read and dropped.
const MAX_KEPT: usize = 4 << 20;
/// Time to read on when the process has ended, while one that it started keeps its streams open.
const GRACE: Duration = Duration::from_millis(300);

/// How a command ended.
#[derive(Debug)]
pub(super) struct Ran {
    /// Exit code; `None` if the deadline or a signal ended it.
    pub(super) code: Option<i32>,
    /// Whether the deadline ended it.
    pub(super) late: bool,
    pub(super) out: String,
    pub(super) err: String,
}

/// Runs `pointsman-policy` of this version with `arguments`.
///
/// # Errors
/// No process can be started.
pub(super) async fn run(arguments: Vec<OsString>, limit: Duration) -> io::Result<Ran> {
    let mut command = Command::new(own_program()?);
    command
        .arg0("pointsman-policy")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // A group of its own: the terminal's Ctrl-C does not reach it, and all of it can be ended.
    let mut child = command.process_group(0).spawn()?;
    let group = Group::of(&child);
    let ran = read_to_end(&mut child, limit).await?;
    if ran.late {
        drop(group);
        child.wait().await?;
    } else {
        group.release();
    }
    Ok(ran)
}

/// The file of this program, also when a newer build has replaced it.
fn own_program() -> io::Result<std::path::PathBuf> {
    let running = Path::new("/proc/self/exe");
    if running.exists() { Ok(running.to_owned()) } else { std::env::current_exe() }
}

async fn read_to_end(child: &mut Child, limit: Duration) -> io::Result<Ran> {
    let (mut out, mut err) = (Stream::new(child.stdout.take()), Stream::new(child.stderr.take()));
    let mut end = Instant::now() + limit;
    let mut status = None;
    while status.is_none() || out.is_open() || err.is_open() {
        tokio::select! {
            () = out.read() => {}
            () = err.read() => {}
            ended = child.wait(), if status.is_none() => {
                status = Some(ended?);
                end = end.min(Instant::now() + GRACE);
            }
            () = sleep_until(end) => break,
        }
    }
    Ok(Ran {
        code: status.and_then(|status| status.code()),
        late: status.is_none(),
        out: out.text(),
        err: err.text(),
    })
}

/// The beginning of an output stream.
struct Stream<R> {
    reader: Option<R>,
    kept: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Stream<R> {
    fn new(reader: Option<R>) -> Self {
        Self { reader, kept: Vec::new() }
    }

    fn is_open(&self) -> bool {
        self.reader.is_some()
    }

    /// Reads the next piece. Never returns when the stream has ended.
    async fn read(&mut self) {
        let Some(reader) = &mut self.reader else { return std::future::pending().await };
        let mut piece = [0; 8_192];
        match reader.read(&mut piece).await {
            Ok(0) | Err(_) => self.reader = None,
            Ok(count) => {
                let free = MAX_KEPT.saturating_sub(self.kept.len());
                self.kept.extend(piece.iter().take(count.min(free)));
            }
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }
}

/// A process group that ends when this is dropped.
struct Group(Option<Pid>);

impl Group {
    /// The group that the child leads.
    fn of(child: &Child) -> Self {
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        Self(pid.and_then(Pid::from_raw))
    }

    /// Leaves the group alone: its leader has ended by itself, and its id may soon be another's.
    fn release(mut self) {
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            // An error means that the group is gone.
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}
