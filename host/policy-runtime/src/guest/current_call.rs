//! The call that a guest is serving, as its log, its clocks and its randomness see it.
//!
//! WASI streams and clocks own their data, so they share one value with the guest's store instead of
//! borrowing the decision's context. One thread at a time is in a store: the lock never waits.

use std::sync::Arc;

use parking_lot::Mutex;
use pointsman_routing::{Call, DecisionContext, Generation};

/// Lines that a guest may log in one call; the rest is dropped.
const LINES_PER_CALL: u32 = 8;
/// Bytes that a guest may print in one call. No tick ends code that only prints.
pub(super) const PRINTED_PER_CALL: usize = 256 * 1024;
/// Least number of bytes that a write counts as.
const BYTES_OF_A_WRITE: usize = 64;

/// The present call.
#[derive(Debug)]
pub(super) struct CurrentCall(Mutex<CallData>);

#[derive(Debug)]
pub(super) struct CallData {
    pub(super) now_us: u64,
    pub(super) seed: u64,
    /// Number of the call, from 1.
    pub(super) number: u64,
    pub(super) generation: Option<Generation>,
    request_id: String,
    has_request_id: bool,
    lines_left: u32,
    printed_left: usize,
    /// Name of the policy, once it described itself.
    pub(super) policy: Arc<str>,
    /// Whether the guest serves: it is not being configured and tried any more.
    pub(super) serves: bool,
    /// Beginning of what the guest wrote to stderr or as an error.
    pub(super) last_words: String,
}

/// Bytes of [`CallData::last_words`].
const MAX_LAST_WORDS: usize = 400;

impl CurrentCall {
    /// The state before the first call: `configure` may log as much as a call.
    pub(super) fn new(policy: Arc<str>) -> Self {
        Self(Mutex::new(CallData {
            now_us: 0,
            seed: 0,
            number: 0,
            generation: None,
            request_id: String::new(),
            has_request_id: false,
            lines_left: LINES_PER_CALL,
            printed_left: PRINTED_PER_CALL,
            policy,
            serves: false,
            last_words: String::new(),
        }))
    }

    /// Notes the name that the policy gives itself.
    pub(super) fn set_policy(&self, name: &str) {
        let mut data = self.0.lock();
        if &*data.policy != name {
            data.policy = Arc::from(name);
        }
    }

    /// Notes that the guest was configured and tried.
    pub(super) fn serve(&self) {
        self.0.lock().serves = true;
    }

    /// Starts the next call.
    pub(super) fn begin(&self, context: &DecisionContext<'_>, call: &Call) {
        let mut data = self.0.lock();
        (data.now_us, data.seed) = (call.now_us, call.seed);
        data.number += 1;
        data.generation = context.generation();
        // The string keeps its memory from call to call.
        data.request_id.clear();
        data.request_id.push_str(context.request_id().unwrap_or_default());
        data.has_request_id = context.request_id().is_some();
        (data.lines_left, data.printed_left) = (LINES_PER_CALL, PRINTED_PER_CALL);
        data.last_words.clear();
    }

    /// Keeps a line for the message of a failure.
    pub(super) fn remember(&self, line: &str) {
        let mut data = self.0.lock();
        // Rust's standard library adds advice that applies to terminals.
        if line.is_empty() || line.starts_with("note: ") || data.last_words.len() >= MAX_LAST_WORDS {
            return;
        }
        if !data.last_words.is_empty() {
            data.last_words.push(' ');
        }
        data.last_words.extend(line.chars().take(MAX_LAST_WORDS));
    }

    /// Runs `read` on the present call.
    pub(super) fn with<T>(&self, read: impl FnOnce(&CallData) -> T) -> T {
        read(&self.0.lock())
    }

    /// Microseconds since the Unix epoch.
    pub(super) fn now_us(&self) -> u64 {
        self.0.lock().now_us
    }

    /// Takes one of the call's log lines; `false` when none is left.
    pub(super) fn take_line(&self) -> bool {
        let mut data = self.0.lock();
        let left = data.lines_left.checked_sub(1);
        data.lines_left = left.unwrap_or(0);
        left.is_some()
    }

    /// Takes what a write of this many bytes counts as; `false` when the call may not print it.
    pub(super) fn take_printed(&self, bytes: usize) -> bool {
        let mut data = self.0.lock();
        let left = data.printed_left.checked_sub(bytes.max(BYTES_OF_A_WRITE));
        data.printed_left = left.unwrap_or(0);
        left.is_some()
    }
}

impl CallData {
    /// The request's id, when it is known.
    pub(super) fn request_id(&self) -> Option<&str> {
        self.has_request_id.then_some(self.request_id.as_str())
    }
}
