//! Code of others that may panic over a file: its panic becomes an error and one line of the log.
//!
//! No backtrace is made of it. With `RUST_BACKTRACE=1` one maps all debug information of the binary, which is more memory than
//! the daemon takes, and it stays: a file in the policy folder must not be able to do that.

use std::{
    any::Any,
    cell::Cell,
    panic::{self, AssertUnwindSafe, PanicHookInfo, catch_unwind},
    sync::Once,
};

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Send + Sync>;

static INSTALLED: Once = Once::new();

thread_local! {
    /// A panic of this thread is somebody's error here, and no defect to be traced.
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Does what may panic, and answers what the panic said.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    INSTALLED.call_once(|| panic::set_hook(quiet(panic::take_hook())));
    let outer = CONTAINED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    CONTAINED.set(outer);
    outcome.map_err(|said| words(&*said))
}

/// The hook before, but for panics that are contained.
fn quiet(before: Hook) -> Hook {
    Box::new(move |panic| {
        if CONTAINED.get() {
            let place = panic.location().map(ToString::to_string);
            tracing::warn!(place, said = words(panic.payload()), "a policy's file made its reader panic");
        } else {
            before(panic);
        }
    })
}

fn words(said: &(dyn Any + Send)) -> String {
    let text = said.downcast_ref::<&str>().copied();
    text.or_else(|| said.downcast_ref::<String>().map(String::as_str)).unwrap_or("no words").to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use super::*;

    #[test]
    fn a_contained_panic_is_an_error_and_never_meets_the_hook_that_traces() {
        let traced = Arc::new(AtomicU32::new(0));
        let _ = catch_panic(|| ());
        let count = traced.clone();
        panic::set_hook(quiet(Box::new(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        })));
        assert_eq!(catch_panic(|| 5), Ok(5));
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
