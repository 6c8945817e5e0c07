//! Memory of messages that are being read.
//!
//! A message is decoded when it is whole. Until then its bytes belong to no request, so that thousands of
//! streams with one unfinished message each could fill the memory. A large message therefore needs room
//! before its first byte is read.

use std::{
    error::Error,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use tonic::{Status, codegen::Service};

use crate::Picker;

/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// Largest message that needs no room, bytes. HTTP/2 lets a proxy send as much on each stream unread.
const SMALL: usize = 128 * 1024;

/// A service whose messages are counted.
#[derive(Debug)]
pub struct Counted<S, P> {
    service: S,
    picker: Arc<P>,
    max_body: usize,
}

impl<S, P> Counted<S, P> {
    pub(crate) fn new(service: S, picker: Arc<P>, max_body: usize) -> Self {
        Self { service, picker, max_body }
    }
}

impl<S: Clone, P> Clone for Counted<S, P> {
    fn clone(&self) -> Self {
        Self { service: self.service.clone(), picker: self.picker.clone(), max_body: self.max_body }
    }
}

impl<S, P: Picker, B> Service<http::Request<B>> for Counted<S, P>
where
    S: Service<http::Request<MessageBytes<B, P>>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> S::Future {
        let (picker, max_body) = (self.picker.clone(), self.max_body);
        self.service.call(request.map(|body| MessageBytes {
            body,
            picker,
            max_body,
            prefix: [0; PREFIX],
            read: 0,
            rest: 0,
            room: None,
            refused: None,
        }))
    }
}

/// The messages of one stream.
pub struct MessageBytes<B, P: Picker> {
    body: B,
    picker: Arc<P>,
    max_body: usize,
    prefix: [u8; PREFIX],
    /// Bytes of the prefix that have come.
    read: usize,
    /// Bytes of the message that have not come.
    rest: usize,
    /// Room for the message.
    room: Option<P::Room>,
    /// Why the message that comes next cannot be read.
    refused: Option<Status>,
}

impl<B, P: Picker> MessageBytes<B, P> {
    /// Returns how many bytes can be read: those before a message for which there is no room.
    fn count(&mut self, all: &[u8]) -> usize {
        let mut data = all;
        while !data.is_empty() {
            if self.rest > 0 {
                let taken = self.rest.min(data.len());
                data = data.get(taken..).unwrap_or_default();
                self.rest -= taken;
            } else if let Some((first, rest)) = data.split_first() {
                if let Some(byte) = self.prefix.get_mut(self.read) {
                    *byte = *first;
                }
                self.read += 1;
                data = rest;
                if self.read == PREFIX
                    && let Err(refused) = self.begin()
                {
                    self.refused = Some(refused);
                    return (all.len() - data.len()).saturating_sub(PREFIX);
                }
            }
        }
        if self.rest == 0 {
            // It is whole: who gets it counts its bytes.
            self.room = None;
        }
        all.len()
    }

    fn begin(&mut self) -> Result<(), Status> {
        let [_, length @ ..] = self.prefix;
        self.read = 0;
        self.rest = u32::from_be_bytes(length).try_into().unwrap_or(usize::MAX);
        self.room = None;
        if self.rest > SMALL {
            // One that is too large is refused before any of it is kept.
            self.room = self.picker.reserve(self.rest.min(self.max_body));
            if self.room.is_none() {
                return Err(Status::resource_exhausted(format!(
                    "reading a message of {} bytes: the requests in flight use the memory for it",
                    self.rest
                )));
            }
        }
        Ok(())
    }
}

impl<B, P> Body for MessageBytes<B, P>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
    P: Picker,
    P::Room: Unpin,
{
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        if let Some(refused) = this.refused.take() {
            return Poll::Ready(Some(Err(refused.into())));
        }
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        let Some(frame) = frame else { return Poll::Ready(None) };
        let cut = |mut data: Bytes| {
            data.truncate(this.count(&data));
            data
        };
        Poll::Ready(Some(frame.map(|frame| frame.map_data(cut)).map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.refused.is_none() && self.body.is_end_stream()
    }
}
