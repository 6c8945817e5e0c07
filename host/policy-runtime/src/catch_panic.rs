//! Turns a panic of the compiler, or of the component encoder, into an error.
//!
//! A file in the policy directory can make them panic. The thread that reads the file must survive, and no
//! backtrace may be captured: with `RUST_BACKTRACE=1` the default hook maps all debug information of the
//! binary, 146 MB that stay mapped. A hook belongs to the process, so this library only makes one
//! ([`panic_hook`]), and the binary installs it.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind},
    thread,
};

/// Stack of the thread that parses and compiles, bytes. Only what is used takes memory.
const STACK_BYTES: usize = 64 << 20;

/// A hook as [`std::panic::set_hook`] takes it.
pub type PanicHook = Box<dyn Fn(&PanicHookInfo<'_>) + Send + Sync>;

thread_local! {
    /// Whether a panic of this thread becomes an error. The hook runs on the panicking thread and gets no
    /// other context.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` and returns its result, or the message of its panic.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let outer = CAUGHT.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    CAUGHT.set(outer);
    outcome.map_err(|payload| message(&*payload))
}

/// Like [`catch_panic`], on a thread with a deep stack: parsers and the compiler descend by recursion into
/// what a file nests.
pub(crate) fn on_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("pointsman-compile".to_owned()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, || catch_panic(work)).map_err(|error| error.to_string())?;
        thread.join().unwrap_or_else(|payload| Err(message(&*payload)))
    })
}

/// Makes a panic hook that logs one line, without a backtrace, for a panic over a policy file, and passes
/// every other panic to `next`.
///
/// ```
/// std::panic::set_hook(pointsman_policy_runtime::panic_hook(std::panic::take_hook()));
/// ```
#[must_use]
pub fn panic_hook(next: PanicHook) -> PanicHook {
    Box::new(move |panic| {
        if CAUGHT.get() {
            let location = panic.location().map(ToString::to_string);
            tracing::warn!(location, panic = message(panic.payload()), "policy file made the compiler panic");
        } else {
            next(panic);
        }
    })
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use std::{
        panic,
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
    };

    use super::*;

    /// Counts panics that reach it.
    fn counting_hook() -> (Arc<AtomicU32>, PanicHook) {
        let count = Arc::new(AtomicU32::new(0));
        let counted = count.clone();
        let hook = move |_: &PanicHookInfo<'_>| {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        (count, Box::new(hook))
    }

    #[test]
    fn a_caught_panic_is_an_error_and_meets_the_next_hook_only_where_the_binary_installed_no_other() {
        let (seen, hook) = counting_hook();
        panic::set_hook(hook);
        assert_eq!(catch_panic(|| 5), Ok(5));
        assert_eq!(catch_panic(|| panic!("caught")), Err::<(), _>("caught".to_owned()));
        assert_eq!(seen.load(Ordering::SeqCst), 1, "the library leaves the hook of the process alone");

        let (traced, hook) = counting_hook();
        panic::set_hook(panic_hook(hook));
        let nested = catch_panic(|| {
            let inner = catch_panic(|| panic!("in {}", "words"));
            assert_eq!(inner, Err::<(), _>("in words".to_owned()));
            panic!("still within")
        });
        assert_eq!(nested, Err::<(), _>("still within".to_owned()));
        assert_eq!(traced.load(Ordering::SeqCst), 0);
        assert!(catch_unwind(|| panic!("outside")).is_err());
        assert_eq!(traced.load(Ordering::SeqCst), 1);
    }
}
