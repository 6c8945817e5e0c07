//! HTTP responses: any bytes are parsed without a panic, and with the same result in pieces of any
//! size.
#![no_main]

use http1_client::{chunked, wire};
use libfuzzer_sys::fuzz_target;

/// Status, body, whether the response is complete, and bytes after it; `None` if it is not a response.
type Read = Option<(u16, Vec<u8>, bool, usize)>;

fuzz_target!(|data: &[u8]| {
    let Some((step, bytes)) = data.split_first() else { return };
    let whole = read(bytes, bytes.len().max(1));
    let pieces = read(bytes, usize::from(*step).max(1));
    assert_eq!(whole, pieces);
    // A chunk may start anywhere.
    let (mut one, mut out) = (chunked::Chunked::default(), Vec::new());
    let decoded = one.decode(bytes, &mut out);
    assert!(out.len() <= bytes.len());
    assert!(decoded.is_err() || one.is_done() || decoded == Ok(0));
});

fn read(bytes: &[u8], step: usize) -> Read {
    let (mut came, mut pieces) = (Vec::new(), bytes.chunks(step));
    let (head, taken) = loop {
        came.extend_from_slice(pieces.next()?);
        if let Some(found) = wire::response(&came, &[]).ok()? {
            break found;
        }
    };
    let (mut framing, mut body, mut behind) = (head.framing, Vec::new(), 0);
    for piece in std::iter::once(&came[taken..]).chain(pieces) {
        behind += framing.decode(piece, &mut body).ok()?;
    }
    let over = framing.is_done();
    assert!(over || behind == 0);
    assert!(!(head.keep && matches!(framing, wire::Framing::ToEnd)));
    Some((head.status.as_u16(), body, over, behind))
}
