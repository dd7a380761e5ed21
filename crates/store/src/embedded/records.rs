//! The records of objects and of the log. Each has a checksum over its place and its content, so that a damaged one is never
//! taken for another object or another value.

use crc32fast::Hasher;
use tortie_api::Key;

use super::Revision;
use crate::{Stored, Written, stored_json};

/// The key of a record: the plural of the kind, the namespace and the name.
pub(super) type Path<'a> = (&'a str, &'a str, &'a str);

/// The bytes of a checksum, which begin each record (CRC-32 as in Ethernet, big-endian).
const CHECKSUM: usize = 4;

/// The table of a record.
#[derive(Debug, Clone, Copy)]
enum Place {
    Objects = 1,
    Log = 2,
}

fn checksum(place: Place, path: Path<'_>, revision: Revision, json: &[u8]) -> [u8; CHECKSUM] {
    let mut hasher = Hasher::new();
    hasher.update(&[place as u8]);
    for part in [path.0, path.1, path.2] {
        hasher.update(&(part.len() as u64).to_be_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.update(&revision.to_be_bytes());
    hasher.update(json);
    hasher.finalize().to_be_bytes()
}

/// The record of an object: checksum, revision (8 bytes, big-endian), JSON.
pub(super) fn object(path: Path<'_>, revision: Revision, json: &[u8]) -> Vec<u8> {
    [&checksum(Place::Objects, path, revision, json)[..], &revision.to_be_bytes(), json].concat()
}

/// A record of the log: checksum, JSON; of a deletion, without JSON.
pub(super) fn logged(path: Path<'_>, revision: Revision, json: &[u8]) -> Vec<u8> {
    [&checksum(Place::Log, path, revision, json)[..], json].concat()
}

/// The revision and the JSON in the record of an object; `None` if it is damaged.
pub(super) fn read_object<'a>(path: Path<'_>, record: &'a [u8]) -> Option<(Revision, &'a [u8])> {
    let (sum, rest) = record.split_first_chunk::<CHECKSUM>()?;
    let (revision, json) = rest.split_first_chunk()?;
    let revision = Revision::from_be_bytes(*revision);
    (*sum == checksum(Place::Objects, path, revision, json)).then_some((revision, json))
}

/// The JSON in a record of the log; `None` if it is damaged.
pub(super) fn read_logged<'a>(path: Path<'_>, revision: Revision, record: &'a [u8]) -> Option<&'a [u8]> {
    let (sum, json) = record.split_first_chunk::<CHECKSUM>()?;
    (*sum == checksum(Place::Log, path, revision, json)).then_some(json)
}

/// The revision of an object. That of a damaged record is 0, so that whoever has read it can replace it.
pub(super) fn revision(path: Path<'_>, record: &[u8]) -> Revision {
    read_object(path, record).map_or(0, |(revision, _)| revision)
}

/// The object of a record. That of a damaged one is a string, which no reader understands.
pub(super) fn stored(key: Key, path: Path<'_>, record: &[u8]) -> Stored {
    let (revision, value) = match read_object(path, record) {
        Some((revision, json)) => (revision, stored_json::decode(&key, json)),
        None => (0, stored_json::unreadable(&key, &"its record in the store's file is damaged", record)),
    };
    Stored::new(key, value, Written::at(revision))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PATH: Path<'_> = ("tiers", "n", "x");

    #[test]
    fn a_record_is_read_only_as_what_it_is() {
        let (record, log) = (object(PATH, 7, b"{}"), logged(PATH, 7, b"{}"));
        assert_eq!(read_object(PATH, &record), Some((7, &b"{}"[..])));
        assert_eq!(read_logged(PATH, 7, &log), Some(&b"{}"[..]));
        assert_eq!(read_logged(PATH, 7, &logged(PATH, 7, b"")), Some(&b""[..]));
        assert_eq!(read_logged(PATH, 8, &log), None, "another revision");
        for other in [("tier", "sn", "x"), ("tiers", "nx", ""), ("tiers", "n", "y")] {
            assert_eq!((read_object(other, &record), read_logged(other, 7, &log)), (None, None), "{other:?}");
        }
        assert_eq!(read_object(PATH, &log), None, "a record of the log");
        for length in 0..record.len() {
            assert_eq!(read_object(PATH, &record[..length]), None, "{length}");
        }
        for bit in 0..8 * record.len() {
            let mut damaged = record.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read_object(PATH, &damaged), None, "bit {bit}");
        }
    }
}
