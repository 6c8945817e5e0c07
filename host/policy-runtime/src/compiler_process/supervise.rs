//! Runs one compiler process: passes it the file, bounds its answer and its time, and kills it when it is no
//! longer wanted.

use std::{
    io::{self, Read, Write as _},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::process::Signal;

use super::{
    CompileLimits,
    cancel::{Cancel, Event},
    wire::{Reply, Request},
};
use crate::split::MAX_MODULES;

/// Hidden command of the daemon's binary.
const COMMAND: &str = "compile-policy";
/// Longest first line of an answer, bytes.
const MAX_HEAD_BYTES: usize = 1 << 20;
/// Bytes kept of what the process writes to stderr: the reason of an abort.
const MAX_STDERR_BYTES: u64 = 4_096;
/// How long a process may live after its output has ended.
const EXIT_GRACE: Duration = Duration::from_secs(2);

/// Unit of CPU times in `/proc`, milliseconds: USER_HZ is 100.
const MILLIS_OF_TICK: u64 = 10;

/// Signals that the kernel sends for what a process does: KILL for the hard limit of CPU time, or when there
/// is no more memory. Others come from outside.
const SIGNALS_OF_FAULTS: [Signal; 10] = [
    Signal::ABORT,
    Signal::BUS,
    Signal::FPE,
    Signal::ILL,
    Signal::KILL,
    Signal::SEGV,
    Signal::SYS,
    Signal::TRAP,
    Signal::XCPU,
    Signal::XFSZ,
];

/// How a process ended.
pub(super) enum Ended {
    /// With an answer, and the parts of the file.
    Answered(Reply, Vec<Vec<u8>>),
    /// The file is to blame: memory, CPU time, stack or a panic.
    Died(String),
    /// It gave no answer, or was cancelled.
    Failed(String),
    /// The file is not to blame: the process could not be started, got too little CPU time, or was told to
    /// end.
    NotRun(String),
}

pub(super) fn run(
    program: &Path,
    request: &Request,
    bytes: &[u8],
    limits: &CompileLimits,
    cancel: &Cancel,
) -> Ended {
    match try_run(program, request, bytes, limits, cancel) {
        Ok(ended) => ended,
        Err(error) => {
            Ended::NotRun(format!("the compiler process {} cannot be run: {error}", program.display()))
        }
    }
}

fn try_run(
    program: &Path,
    request: &Request,
    bytes: &[u8],
    limits: &CompileLimits,
    cancel: &Cancel,
) -> io::Result<Ended> {
    let mut child = start(program, request)?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (events, inbox) = mpsc::channel();
    cancel.tell(events.clone());
    let most = (request.file_bytes as u64).saturating_mul(2).saturating_add(MAX_HEAD_BYTES as u64);
    thread::scope(|scope| {
        let started = (|| {
            thread::Builder::new().spawn_scoped(scope, move || {
                // It may end before it has read everything.
                stdin.map(|mut stdin| stdin.write_all(bytes))
            })?;
            thread::Builder::new().spawn_scoped(scope, move || {
                let _ = events.send(Event::Output(read_up_to(stdout, most)));
            })?;
            thread::Builder::new().spawn_scoped(scope, move || {
                let mut stderr = stderr;
                let text = read_up_to(stderr.as_mut(), MAX_STDERR_BYTES);
                // The rest is read, so that the process does not block.
                let _ = stderr.map(|mut rest| io::copy(&mut rest, &mut io::sink()));
                text
            })
        })();
        // Whatever fails from here on, the threads above end with the process.
        let event = inbox.recv_timeout(if started.is_ok() { limits.timeout } else { Duration::ZERO });
        let used = event.is_err().then(|| cpu_time(&child)).flatten().unwrap_or_default();
        let status = match &event {
            Ok(Event::Output(_)) => end(&mut child)?,
            Ok(Event::Cancelled) | Err(_) => {
                child.kill()?;
                child.wait()?
            }
        };
        let errors = started?.join().unwrap_or_default();
        Ok(match event {
            Ok(Event::Output(output)) => answer(status, output, &errors, limits),
            Ok(Event::Cancelled) => Ended::Failed("cancelled: the file changed".to_owned()),
            Err(_) => Ended::NotRun(format!(
                "its process got {:.1} s of CPU time in {} s: the host is busy",
                used.as_secs_f64(),
                limits.timeout.as_secs()
            )),
        })
    })
}

fn start(program: &Path, request: &Request) -> io::Result<Child> {
    Command::new(program)
        .arg(COMMAND)
        .arg(serde_json::to_string(request)?)
        // Nothing of the daemon's environment is its business.
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A group of its own: signals to the daemon's group, as Ctrl-C in a terminal, do not reach it. It
        // ends with the daemon.
        .process_group(0)
        .spawn()
}

/// Returns the CPU time that a running process used so far.
fn cpu_time(child: &Child) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).ok()?;
    // The name of the program, in parentheses, may contain spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<u64>).sum::<Result<u64, _>>();
    Some(Duration::from_millis(ticks.ok()? * MILLIS_OF_TICK))
}

/// Waits a short time for a process whose output has ended, and kills it after that.
fn end(child: &mut Child) -> io::Result<ExitStatus> {
    let started = tokio::time::Instant::now();
    while started.elapsed() < EXIT_GRACE {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        thread::sleep(Duration::from_micros(200));
    }
    child.kill()?;
    child.wait()
}

fn read_up_to(from: Option<impl Read>, most: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        // The bytes that arrived before an error decide.
        let _ = from.take(most).read_to_end(&mut bytes);
    }
    bytes
}

fn answer(status: ExitStatus, mut output: Vec<u8>, errors: &[u8], limits: &CompileLimits) -> Ended {
    if let Some(signal) = status.signal().filter(|signal| !is_of_fault(*signal)) {
        return Ended::NotRun(format!("its process was ended from outside by signal {signal}"));
    }
    if !status.success() {
        return Ended::Died(reason(status, errors, limits));
    }
    let garbled = || Ended::Failed("the compiler process gave no answer".to_owned());
    let Some(end) = output.iter().take(MAX_HEAD_BYTES).position(|byte| *byte == b'\n') else {
        return garbled();
    };
    let rest = output.split_off(end + 1);
    let Ok(reply) = serde_json::from_slice(&output) else { return garbled() };
    match parts(&reply, &rest) {
        Some(parts) => Ended::Answered(reply, parts),
        None => garbled(),
    }
}

fn is_of_fault(signal: i32) -> bool {
    SIGNALS_OF_FAULTS.iter().any(|fault| fault.as_raw() == signal)
}

/// Returns the component and the modules that follow an answer: as many bytes as it says, and no more.
fn parts(reply: &Reply, mut rest: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    if let Reply::File { component_bytes, module_bytes, .. } = reply {
        if module_bytes.len() > MAX_MODULES {
            return None;
        }
        for bytes in std::iter::once(component_bytes).chain(module_bytes) {
            let (part, others) = rest.split_at_checked(*bytes)?;
            parts.push(part.to_owned());
            rest = others;
        }
    }
    rest.is_empty().then_some(parts)
}

/// Says why a process died, with the limit if that can be determined.
fn reason(status: ExitStatus, errors: &[u8], limits: &CompileLimits) -> String {
    let errors = String::from_utf8_lossy(errors);
    let said = |text: &str| errors.contains(text);
    let memory = limits.memory_bytes >> 20;
    match status.signal() {
        Some(signal) if signal == Signal::XCPU.as_raw() => {
            format!("it took more than {:?} of CPU time", limits.cpu)
        }
        _ if said("memory allocation of") => format!("it took more than {memory} MiB of memory"),
        _ if said("overflowed its stack") => "it overflowed the compiler's stack".to_owned(),
        Some(signal) => format!("the compiler process was ended by signal {signal}"),
        None => format!("the compiler process ended with {status}"),
    }
}
