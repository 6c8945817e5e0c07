//! A guest's lines in the host's log: those that it passes to `log`, and those that it prints.

use std::sync::Arc;

use bytes::Bytes;
use wasmtime_wasi::{
    cli::{IsTerminal, StdoutStream},
    p2::{OutputStream, Pollable, StreamError, StreamResult},
};

use super::current_call::{CurrentCall, PRINTED_PER_CALL};
use crate::slot_log::{PolicyLine, SlotLog};

/// Characters of a line; the rest is dropped.
const MAX_LINE_CHARS: usize = 512;

/// Writes a guest's lines to the host's log.
#[derive(Clone)]
pub(super) struct GuestLog {
    slot: Arc<SlotLog>,
    call: Arc<CurrentCall>,
    /// Level of printed lines.
    printed: tracing::Level,
}

impl GuestLog {
    pub(super) fn new(slot: Arc<SlotLog>, call: Arc<CurrentCall>) -> Self {
        Self { slot, call, printed: tracing::Level::INFO }
    }

    /// Returns the same log for the guest's stderr, where languages print panics and exceptions.
    pub(super) fn of_stderr(&self) -> Self {
        Self { printed: tracing::Level::ERROR, ..self.clone() }
    }

    /// Writes one line, unless the call or the slot has used up its lines. What a guest says before it
    /// serves, in calls with made-up facts, has the level `debug` in the host's log.
    pub(super) fn write(&self, level: tracing::Level, message: &str) {
        if level == tracing::Level::ERROR {
            self.call.remember(message.trim());
        }
        if !self.call.take_line() || !self.slot.limit.allows() {
            return;
        }
        let line: String = message.trim_end().chars().take(MAX_LINE_CHARS).collect();
        self.call.with(|call| {
            let policy = &*call.policy;
            // The seed is also in the receipt of the decision that the line belongs to.
            let (request, seed) = (call.request_id(), call.seed);
            let generation = call.generation.map(|generation| generation.0);
            match level {
                _ if !call.serves => {
                    tracing::debug!(target: "pointsman::guest", policy, trial = true, "{line}");
                }
                tracing::Level::ERROR => {
                    tracing::error!(target: "pointsman::guest", policy, generation, request, seed, "{line}");
                }
                tracing::Level::WARN => {
                    tracing::warn!(target: "pointsman::guest", policy, generation, request, seed, "{line}");
                }
                tracing::Level::INFO => {
                    tracing::info!(target: "pointsman::guest", policy, generation, request, seed, "{line}");
                }
                _ => tracing::debug!(target: "pointsman::guest", policy, generation, request, seed, "{line}"),
            }
            self.slot.keep(PolicyLine {
                number: 0,
                at_ms: 0,
                level: name_of(level),
                policy: call.policy.clone(),
                trial: !call.serves,
                generation,
                request_id: request.map(str::to_owned),
                text: line,
            });
        });
    }
}

fn name_of(level: tracing::Level) -> &'static str {
    match level {
        tracing::Level::ERROR => "error",
        tracing::Level::WARN => "warn",
        tracing::Level::INFO => "info",
        _ => "debug",
    }
}

impl IsTerminal for GuestLog {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for GuestLog {
    fn async_stream(&self) -> Box<dyn tokio::io::AsyncWrite + Send + Sync> {
        Box::new(tokio::io::sink())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(Lines { log: self.clone(), partial: Vec::new() })
    }
}

/// Joins what a guest prints to lines: many guests print a line in pieces.
struct Lines {
    log: GuestLog,
    /// The line that is not complete yet.
    partial: Vec<u8>,
}

impl OutputStream for Lines {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        if !self.log.call.take_printed(bytes.len()) {
            let message = format!("the policy prints more than {PRINTED_PER_CALL} bytes in a call");
            return Err(StreamError::Trap(wasmtime::Error::msg(message)));
        }
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let free = (MAX_LINE_CHARS * 4).saturating_sub(self.partial.len());
            self.partial.extend(piece.iter().take(free));
            if piece.ends_with(b"\n") {
                self.log.write(self.log.printed, &String::from_utf8_lossy(&self.partial));
                self.partial.clear();
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(64 * 1024)
    }
}

#[async_trait::async_trait]
impl Pollable for Lines {
    async fn ready(&mut self) {}
}
