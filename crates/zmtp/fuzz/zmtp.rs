//! ZMTP bytes of a publisher: greetings, frames and commands, in pieces of any size.
#![no_main]

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use zmtp::{
    command::Command,
    frame::{self, Assembler, FrameError, Item, MAX_COMMAND, MAX_FRAMES},
    greeting,
};

/// Small, so that the fuzzer exceeds it.
const MAX_MESSAGE: usize = 600;

fuzz_target!(|data: &[u8]| {
    let Some((step, bytes)) = data.split_first() else { return };
    greets(bytes);
    frames(bytes, usize::from(*step).max(1));
});

fn greets(bytes: &[u8]) {
    let whole = greeting::check(bytes);
    let first = (0..=bytes.len()).map(|cut| greeting::check(&bytes[..cut])).find(|said| *said != Ok(None));
    // An error that is reported early must not change with more bytes.
    assert_eq!(first.unwrap_or(Ok(None)), whole);
}

fn frames(bytes: &[u8], step: usize) {
    let whole = read(bytes, bytes.len().max(1));
    assert_eq!(whole, read(bytes, step));
    let mut again = BytesMut::new();
    for item in &whole.0 {
        match item {
            Item::Message(parts) => {
                assert!((1..=MAX_FRAMES).contains(&parts.len()));
                assert!(parts.iter().map(bytes::Bytes::len).sum::<usize>() <= MAX_MESSAGE);
                frame::message(&parts.iter().map(AsRef::as_ref).collect::<Vec<_>>(), &mut again);
            }
            Item::Command(body) => {
                assert!(body.len() <= MAX_COMMAND);
                let _ = Command::read(body);
                frame::command(body, &mut again);
            }
        }
    }
    assert_eq!(read(&again, step), (whole.0, None));
}

fn read(bytes: &[u8], step: usize) -> (Vec<Item>, Option<FrameError>) {
    let (mut unread, mut assembler, mut items) = (BytesMut::new(), Assembler::new(MAX_MESSAGE), Vec::new());
    for piece in bytes.chunks(step) {
        unread.extend_from_slice(piece);
        loop {
            match assembler.next(&mut unread) {
                Ok(Some(item)) => items.push(item),
                Ok(None) => break,
                Err(error) => return (items, Some(error)),
            }
        }
    }
    (items, None)
}
