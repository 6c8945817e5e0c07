//! A response body that is handed over in pieces, so that the HTTP server copies a bounded number of bytes
//! for a client before the client reads.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// A body in pieces.
#[derive(Debug)]
pub(super) struct Pieces<B> {
    body: B,
    /// Largest piece, bytes.
    largest: usize,
    /// The part of the last frame that was not handed over yet.
    rest: Bytes,
}

impl<B> Pieces<B> {
    pub(super) fn of(body: B, largest: usize) -> Self {
        Self { body, largest, rest: Bytes::new() }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Pieces<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.rest.is_empty() {
            let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(cx)) else {
                return Poll::Ready(None);
            };
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) => self.rest = data,
                Ok(Err(other)) => return Poll::Ready(Some(Ok(other))),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
        let length = self.rest.len().min(self.largest);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut all = SizeHint::new();
        all.set_lower(hint.lower().saturating_add(rest));
        if let Some(upper) = hint.upper() {
            all.set_upper(upper.saturating_add(rest));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body as AxumBody;
    use http_body_util::BodyExt as _;

    use super::*;

    const PIECE: usize = 16 * 1024;

    #[tokio::test]
    async fn a_large_frame_is_cut_and_nothing_is_lost() {
        let text: Bytes = (0..PIECE * 2 + 5).map(|byte| u8::try_from(byte % 251).unwrap()).collect();
        let mut pieces = Pieces::of(AxumBody::from(text.clone()), PIECE);
        assert_eq!(pieces.size_hint().exact(), Some(text.len() as u64));
        let mut lengths = Vec::new();
        let mut all = Vec::new();
        while let Some(frame) = pieces.frame().await {
            let data = frame.unwrap().into_data().unwrap();
            lengths.push(data.len());
            all.extend_from_slice(&data);
            assert_eq!(pieces.size_hint().exact(), Some((text.len() - all.len()) as u64));
        }
        assert_eq!(lengths, [PIECE, PIECE, 5]);
        assert!(all == text && pieces.is_end_stream());
        assert!(Pieces::of(AxumBody::empty(), PIECE).is_end_stream());
    }
}
