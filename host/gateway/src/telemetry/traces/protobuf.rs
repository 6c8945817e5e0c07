//! Writes and reads the protobuf wire format, as far as the OpenTelemetry protocol for traces needs it.

/// Wire types.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// A message that is being written. Fields with their default value are left out, as proto3 does.
#[derive(Clone, Debug, Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// Returns the encoded message.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7F) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u32, wire: u8) {
        self.varint(u64::from(field << 3) | u64::from(wire));
    }

    /// Adds an integer, an enumeration or a boolean.
    pub(super) fn int(&mut self, field: u32, value: u64) {
        if value != 0 {
            self.key(field, VARINT);
            self.varint(value);
        }
    }

    pub(super) fn fixed64(&mut self, field: u32, value: u64) {
        if value != 0 {
            self.key(field, FIXED64);
            self.0.extend_from_slice(&value.to_le_bytes());
        }
    }

    pub(super) fn fixed32(&mut self, field: u32, value: u32) {
        if value != 0 {
            self.key(field, FIXED32);
            self.0.extend_from_slice(&value.to_le_bytes());
        }
    }

    /// Adds bytes or a text.
    pub(super) fn bytes(&mut self, field: u32, value: impl AsRef<[u8]>) {
        if !value.as_ref().is_empty() {
            self.chosen_bytes(field, value.as_ref());
        }
    }

    /// Adds a text that is the chosen one of several fields: its default value is written, too.
    pub(super) fn chosen_bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, BYTES);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    /// Adds an integer that is the chosen one of several fields.
    pub(super) fn chosen_int(&mut self, field: u32, value: u64) {
        self.key(field, VARINT);
        self.varint(value);
    }

    /// Adds a floating-point number that is the chosen one of several fields.
    pub(super) fn chosen_double(&mut self, field: u32, value: f64) {
        self.key(field, FIXED64);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Adds a message.
    pub(super) fn message(&mut self, field: u32, write: impl FnOnce(&mut Self)) {
        let mut inner = Self::default();
        write(&mut inner);
        self.chosen_bytes(field, &inner.0);
    }

    /// Adds a message that is encoded already.
    pub(super) fn encoded(&mut self, field: u32, message: &Self) {
        self.chosen_bytes(field, &message.0);
    }
}

/// The value of a field that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field<'a> {
    Int(u64),
    Bytes(&'a [u8]),
}

/// Reads the integers and the bytes of a message; stops at what is not valid.
pub(super) fn fields(mut bytes: &[u8]) -> impl Iterator<Item = (u64, Field<'_>)> {
    std::iter::from_fn(move || {
        loop {
            let key = take_varint(&mut bytes)?;
            let field = key >> 3;
            match (key & 7) as u8 {
                VARINT => return Some((field, Field::Int(take_varint(&mut bytes)?))),
                BYTES => {
                    let length = usize::try_from(take_varint(&mut bytes)?).ok()?;
                    return Some((field, Field::Bytes(take_bytes(&mut bytes, length)?)));
                }
                FIXED64 => take_bytes(&mut bytes, 8)?,
                FIXED32 => take_bytes(&mut bytes, 4)?,
                _ => return None,
            };
        }
    })
}

fn take_bytes<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..70).step_by(7) {
        let byte = *take_bytes(bytes, 1)?.first()?;
        value |= u64::from(byte & 0x7F).checked_shl(shift).unwrap_or(0);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
