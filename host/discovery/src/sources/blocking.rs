//! Reads files so that no file system can stop a source: a read that hangs, as on a server of NFS that is
//! gone, is given up, and no second one starts beside it.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use tokio::{sync::Mutex, task::JoinHandle, time::Duration};

/// A call that may block. A call that was given up is waited for by the next one.
#[derive(Debug)]
pub(super) struct BlockingCall<T>(Mutex<Option<JoinHandle<T>>>);

impl<T> Default for BlockingCall<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Send + 'static> BlockingCall<T> {
    /// Makes the call on a thread for it, and waits at most `limit`.
    ///
    /// # Errors
    /// It has not ended.
    pub(super) async fn run(
        &self,
        limit: Duration,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let mut running = self.0.lock().await;
        let task = running.get_or_insert_with(|| tokio::task::spawn_blocking(call));
        match tokio::time::timeout(limit, task).await {
            Ok(ended) => {
                *running = None;
                ended.map_err(|error| error.to_string())
            }
            Err(_) => Err(format!("no answer within {limit:?}: check the file system")),
        }
    }
}

/// A file that is read again and again.
#[derive(Debug)]
pub(super) struct FileReader {
    path: PathBuf,
    /// Largest size in bytes.
    most: u64,
    call: BlockingCall<io::Result<Vec<u8>>>,
}

impl FileReader {
    /// Reads a file of at most `most` bytes; nothing is read yet.
    pub(super) fn new(path: PathBuf, most: u64) -> Self {
        Self { path, most, call: BlockingCall::default() }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read within `limit`, is not a regular file, or is too large.
    pub(super) async fn read(&self, limit: Duration) -> Result<Vec<u8>, String> {
        let (path, most) = (self.path.clone(), self.most);
        let read = self.call.run(limit, move || read(&path, most)).await;
        let read = read.and_then(|read| read.map_err(|error| error.to_string()));
        read.map_err(|problem| format!("reading {}: {problem}", self.path.display()))
    }

    /// Reads the file as text.
    ///
    /// # Errors
    /// As [`Self::read`], or it is not UTF-8.
    #[cfg(any(feature = "etcd", feature = "kubernetes"))]
    pub(super) async fn read_text(&self, limit: Duration) -> Result<String, String> {
        let text = String::from_utf8(self.read(limit).await?);
        text.map_err(|_| format!("reading {}: it is not UTF-8", self.path.display()))
    }
}

/// Opening a pipe that has no writer blocks, so only regular files are opened.
fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("it has more than {most} bytes: split it")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn p3_a_call_that_hangs_is_given_up_and_no_second_one_starts() {
        let (call, (go, wait)) = (BlockingCall::default(), std::sync::mpsc::channel::<()>());
        let limit = Duration::from_millis(20);
        let given_up = call.run(limit, move || wait.recv().map_or(1, |()| 2)).await;
        // P3.6
        assert_eq!(given_up, Err("no answer within 20ms: check the file system".to_owned()));
        go.send(()).unwrap();
        // P3.6
        assert_eq!(call.run(Duration::from_secs(20), || 3).await, Ok(2));
        assert_eq!(call.run(Duration::from_secs(20), || 3).await, Ok(3));
    }
}
