//! The process that takes one policy file apart, or compiles one part: the other side of `compiler_process`.
//!
//! It limits itself before it reads the file, because the parser may fail as the compiler may.

use std::{
    borrow::Cow,
    io::{self, Read as _, Write as _},
    process::ExitCode,
};

use rustix::process::{Pid, Resource, Rlimit, Signal};
use wasmtime::{Module, component::Component};

use crate::{
    admission,
    catch_panic::on_deep_stack,
    compiler_process::{
        COMPILE_NICE,
        wire::{Reply, Request, Task},
    },
    engine::{CompileOnly, Limits},
    refusal::Refusal,
    split::split,
};

/// Largest file that the process writes, bytes: code of the largest policy.
const MAX_WRITTEN_BYTES: u64 = 1 << 30;
/// Bytes by which a part may be larger than the file: names and types of imports.
const SPLIT_BYTES: u64 = 1 << 20;

/// Compiles the policy file on stdin as `request` says, and answers on stdout. The hidden command of the
/// daemon's binary calls it.
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
    let most = request.file_bytes as u64 + SPLIT_BYTES;
    io::stdin().take(most + 1).read_to_end(&mut bytes)?;
    let made = on_deep_stack(|| match request.task {
        Task::File { compile } => file(&bytes, compile, &request),
        Task::Part => part(&bytes, &request),
    });
    let made = made.unwrap_or_else(|panic| Err(Refusal::Compile(format!("the compiler panicked: {panic}"))));
    let (reply, parts) = made.unwrap_or_else(|refusal| (Reply::Refused(refusal.into()), Vec::new()));
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, &reply)?;
    out.write_all(b"\n")?;
    for part in parts {
        out.write_all(&part)?;
    }
    out.flush()
}

/// Checks a policy file and takes it apart, or compiles it.
fn file(bytes: &[u8], compile: bool, request: &Request) -> Result<(Reply, Vec<Vec<u8>>), Refusal> {
    let component = admission::component(bytes, &limits(request))?;
    let outline = admission::outline(&component)?;
    if let Some(split) = split(&component) {
        admission::check_split(&split)?;
        let module_bytes = split.modules.iter().map(Vec::len).collect();
        let component_bytes = split.remainder.len();
        let parts = std::iter::once(split.remainder).chain(split.modules).collect();
        return Ok((Reply::File { outline, compiled: false, component_bytes, module_bytes }, parts));
    }
    match component {
        Cow::Borrowed(component) => {
            if compile {
                let engine = compile_only(request)?;
                let linker = engine.linker(outline.wasi).map_err(failed)?;
                admission::link(engine.engine(), &linker, component, &outline)?;
            }
            let reply =
                Reply::File { outline, compiled: compile, component_bytes: 0, module_bytes: Vec::new() };
            Ok((reply, Vec::new()))
        }
        Cow::Owned(encoded) => {
            let component_bytes = encoded.len();
            let reply = Reply::File { outline, compiled: false, component_bytes, module_bytes: Vec::new() };
            Ok((reply, vec![encoded]))
        }
    }
}

/// Compiles a part of a file. Nothing is known of the rest.
fn part(bytes: &[u8], request: &Request) -> Result<(Reply, Vec<Vec<u8>>), Refusal> {
    admission::check_part(bytes, &limits(request))?;
    let engine = compile_only(request)?;
    match wasmparser::Parser::is_component(bytes) {
        true => Component::from_binary(engine.engine(), bytes).map(drop),
        false => Module::from_binary(engine.engine(), bytes).map(drop),
    }
    .map_err(failed)?;
    Ok((Reply::Part, Vec::new()))
}

fn limits(request: &Request) -> Limits {
    Limits { file_bytes: request.file_bytes, memory_bytes: request.memory_bytes, ..Limits::default() }
}

fn compile_only(request: &Request) -> Result<CompileOnly, Refusal> {
    CompileOnly::new(request.reservation, &request.cache).map_err(failed)
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn failed(error: wasmtime::Error) -> Refusal {
    Refusal::Compile(format!("{error:#}"))
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
