//! The process that compiles one policy file: the other side of `compiler_process`.
//!
//! It limits itself before it reads the file, because the parser may fail as the compiler may.

use std::{
    io::{self, Read as _, Write as _},
    process::ExitCode,
};

use rustix::process::{Pid, Resource, Rlimit, Signal};

use crate::{
    admission,
    catch_panic::on_deep_stack,
    compiler_process::{
        COMPILE_NICE,
        wire::{Reply, Request},
    },
    engine::{CompileOnly, Limits},
    refusal::Refusal,
};

/// Largest file that the process writes, bytes: code of the largest policy.
const MAX_WRITTEN_BYTES: u64 = 1 << 30;

/// Compiles the policy file on stdin as `request` says, and answers on stdout. For the hidden command of the
/// daemon's binary.
#[must_use]
pub fn run_compiler_process(request: &str) -> ExitCode {
    match answer(request) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn answer(request: &str) -> io::Result<()> {
    let request: Request = serde_json::from_str(request)?;
    limit_self(&request)?;
    let mut bytes = Vec::new();
    io::stdin().take(request.file_bytes as u64 + 1).read_to_end(&mut bytes)?;
    let made = on_deep_stack(|| compile(&bytes, &request));
    let made = made.unwrap_or_else(|panic| Err(Refusal::Compile(format!("the compiler panicked: {panic}"))));
    let (reply, encoded) = made.unwrap_or_else(|refusal| (Reply::Refused(refusal.into()), Vec::new()));
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, &reply)?;
    out.write_all(b"\n")?;
    out.write_all(&encoded)?;
    out.flush()
}

fn compile(bytes: &[u8], request: &Request) -> Result<(Reply, Vec<u8>), Refusal> {
    let limits =
        Limits { file_bytes: request.file_bytes, memory_bytes: request.memory_bytes, ..Limits::default() };
    let component = admission::component(bytes, &limits)?;
    let outline = admission::outline(&component)?;
    let failed = |error: wasmtime::Error| Refusal::Compile(format!("{error:#}"));
    let engine = CompileOnly::new(request.reservation, &request.cache).map_err(failed)?;
    let linker = engine.linker(outline.wasi).map_err(failed)?;
    admission::link(engine.engine(), &linker, &component, &outline)?;
    let cached = engine.hit_cache();
    let encoded = match component {
        std::borrow::Cow::Borrowed(_) => Vec::new(),
        std::borrow::Cow::Owned(encoded) => encoded,
    };
    Ok((Reply::Compiled { outline, cached, encoded_bytes: encoded.len() }, encoded))
}

/// Lowers the limits of this process. It ends with its parent, and yields to everything else when it is to.
fn limit_self(request: &Request) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = rustix::process::getppid().map(Pid::as_raw_nonzero);
    if parent.is_none_or(|parent| i64::from(parent.get()) != i64::from(request.parent)) {
        // It died before it would have been noticed.
        return Err(io::Error::other("the daemon has ended"));
    }
    lower(Resource::As, request.address_space)?;
    lower(Resource::Cpu, request.cpu_seconds)?;
    lower(Resource::Core, 0)?;
    lower(Resource::Fsize, MAX_WRITTEN_BYTES)?;
    if request.yields {
        rustix::process::setpriority_process(None, COMPILE_NICE)?;
    }
    Ok(())
}

fn lower(resource: Resource, limit: u64) -> io::Result<()> {
    let most = rustix::process::getrlimit(resource).maximum;
    let limit = most.map_or(limit, |most| most.min(limit));
    // The signal of the soft limit of CPU time is told apart from other kills; the hard limit is one second
    // more.
    let hard =
        if resource == Resource::Cpu { most.map_or(limit + 1, |most| most.min(limit + 1)) } else { limit };
    Ok(rustix::process::setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(hard) })?)
}
