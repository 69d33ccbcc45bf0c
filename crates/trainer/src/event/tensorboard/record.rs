//! The format of TensorBoard's event files: records, each of which is a protocol buffer.
//!
//! ```text
//! record = length: u64 | masked crc32c of it: u32 | bytes | masked crc32c of them: u32      little-endian
//! ```
//!
//! Taken: tensorflow 2.21, `lib/io/record_writer.cc`, `lib/hash/crc32c.h`, `core/util/event.proto`,
//! `core/framework/summary.proto`. Only what is written is here, and nothing is read.

/// A record of these bytes.
pub fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let crc = |bytes: &[u8]| masked_crc32c(bytes).to_le_bytes();
    [&length[..], &crc(&length), bytes, &crc(bytes)].concat()
}

/// A checksum that is no fixed point of itself where data holds checksums.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Castagnoli's polynomial, its bits reversed. Taken: RFC 3720, appendix B.4.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// The checksum of each byte.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL * (crc & 1));
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes
        .iter()
        .fold(!0, |crc, byte| TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8))
}

/// A protocol buffer that is being written. Fields are in the order of the calls.
#[derive(Clone, Debug, Default)]
pub struct ProtoMessage(Vec<u8>);

impl ProtoMessage {
    /// A whole number, or a choice.
    pub fn int(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    /// A number of eight bytes.
    pub fn double(mut self, field: u64, value: f64) -> Self {
        self.varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// A number of four bytes.
    pub fn float(mut self, field: u64, value: f32) -> Self {
        self.varint(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Text, or bytes.
    pub fn bytes(mut self, field: u64, value: impl AsRef<[u8]>) -> Self {
        self.varint(field << 3 | 2);
        self.varint(value.as_ref().len() as u64);
        self.0.extend(value.as_ref());
        self
    }

    /// A message within.
    pub fn message(self, field: u64, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }

    /// The bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // Taken: RFC 3720, appendix B.4; the last is the check value of the catalogue of CRCs.
        let ascending: Vec<u8> = (0..32).collect();
        for (bytes, expected) in [
            (&[0; 32][..], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (b"123456789", 0xe306_9283),
        ] {
            assert_eq!(crc32c(bytes), expected);
        }
    }

    /// The records of a file, each checksum checked.
    pub fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while !file.is_empty() {
            let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let bytes = &file[12..12 + n];
            assert_eq!(framed(bytes), &file[..16 + n], "record {}", all.len());
            all.push(bytes.to_vec());
            file = &file[16 + n..];
        }
        all
    }

    #[test]
    fn numbers_and_texts_have_their_wire_types() {
        let inner = ProtoMessage::default().bytes(1, "loss").float(2, 0.5);
        let message = ProtoMessage::default().double(1, 1.0).int(2, 300).message(5, &inner);
        let expected = [
            &[0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f][..],
            &[0x10, 0xac, 0x02],
            &[0x2a, 11, 0x0a, 4, b'l', b'o', b's', b's', 0x15, 0, 0, 0, 0x3f],
        ];
        assert_eq!(message.clone().into_bytes(), expected.concat());
        let twice = [framed(&message.clone().into_bytes()), framed(b"")].concat();
        assert_eq!(records(&twice), [message.into_bytes(), Vec::new()]);
    }
}
