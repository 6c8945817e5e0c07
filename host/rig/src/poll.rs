//! Waits for something that no event announces.

use std::{future::Future, time::Duration};

use anyhow::{Context as _, bail};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Calls `find` until it returns something, for at most `limit`.
///
/// # Errors
/// `find` fails, or returned nothing in time: the error says `what` was waited for.
pub async fn until<T, F: Future<Output = anyhow::Result<Option<T>>>>(
    what: &str,
    limit: Duration,
    mut find: impl FnMut() -> F,
) -> anyhow::Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = find().await.with_context(|| format!("waiting until {what}"))? {
            return Ok(found);
        }
        if began.elapsed() > limit {
            bail!("waited {limit:?} in vain until {what}");
        }
        sleep(PAUSE).await;
    }
}

/// Waits until a server listens on a port of 127.0.0.1.
///
/// # Errors
/// It does not within `limit`.
pub async fn until_listening(name: &str, port: u16, limit: Duration) -> anyhow::Result<()> {
    let connected = || async move { Ok(TcpStream::connect(("127.0.0.1", port)).await.ok().map(drop)) };
    until(&format!("{name} listens on port {port}"), limit, connected).await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_ends_with_what_is_found_with_an_error_or_with_its_time() {
        let turn = Cell::new(0);
        let find = |at: i32| {
            turn.set(turn.get() + 1);
            let turn = turn.get();
            async move { if turn == 9 { bail!("no answer") } else { Ok((turn == at).then_some(turn)) } }
        };
        let limit = Duration::from_secs(1);
        assert_eq!(until("it is there", limit, || find(3)).await.unwrap(), 3);
        let error = until("it is there", limit, || find(0)).await.unwrap_err();
        assert_eq!(format!("{error:#}"), "waiting until it is there: no answer");
        let began = Instant::now();
        let error = until("it is there", limit, || find(0)).await.unwrap_err();
        assert_eq!(error.to_string(), "waited 1s in vain until it is there");
        assert!(began.elapsed() > limit && began.elapsed() < limit * 2);
    }

    #[tokio::test]
    async fn a_server_that_listens_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        until_listening("a server", port, Duration::ZERO).await.unwrap();
        drop(listener);
        assert!(until_listening("a server", port, Duration::from_millis(50)).await.is_err());
    }
}
