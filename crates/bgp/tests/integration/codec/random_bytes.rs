//! No bytes make the codec panic, and what it accepts, it can write.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use testkit::random::{Random, first_number};
use tortie_bgp::codec::{self, Context, Families, Family, Message};

use crate::codec::strategies::{attributes, context, open, prefix};

/// A source of numbers that is fast enough for ten million messages (xorshift).
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Valid messages to start from: damage close to validity reaches deeper than noise.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let mut runner = TestRunner::deterministic();
    let mut seeds = vec![codec::encode_keepalive(), codec::encode_end_of_rib(Family::Ipv6)];
    for index in 0..200 {
        let family = Family::ALL[index % 2];
        let context = context(index % 3 > 0);
        let attributes = attributes(family).new_tree(&mut runner).unwrap().current();
        let prefixes =
            proptest::collection::vec(prefix(family), 1..5).new_tree(&mut runner).unwrap().current();
        seeds
            .extend(codec::encode_announcement(&attributes, family, &prefixes, &context).unwrap_or_default());
        seeds.extend(codec::encode_withdrawal(family, &prefixes));
        seeds.push(codec::encode_open(&open().new_tree(&mut runner).unwrap().current()));
    }
    seeds.retain(|seed| seed.len() < 1200);
    seeds
}

pub(crate) fn damaged(seed: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=numbers.below(3) {
        // The marker is of no interest.
        let at = 16 + numbers.below(bytes.len() - 16);
        match numbers.below(6) {
            0 => bytes[at] = numbers.next() as u8,
            1 => bytes[at] ^= 1 << numbers.below(8),
            2 => bytes[at] = bytes[at].wrapping_add(1),
            3 => drop(bytes.remove(at).max(19)),
            4 => bytes.insert(at, numbers.next() as u8),
            _ => bytes.truncate(at.max(19)),
        }
        if bytes.len() < 20 {
            break;
        }
    }
    // Mostly with a length that fits, because otherwise nothing else is read.
    if numbers.below(10) > 0 && bytes.len() >= 19 {
        let length = (bytes.len() as u16).to_be_bytes();
        bytes[16..18].copy_from_slice(&length);
    }
    bytes
}

#[test]
fn no_bytes_panic_and_what_is_accepted_can_be_written() {
    let seeds = seeds();
    let mut numbers = Numbers(first_number());
    let (mut accepted, mut tolerated, mut rejected) = (0_u64, 0_u64, 0_u64);
    let mut runs = 0;
    let count = Random::cases(200_000).count();
    while runs < count || accepted.min(tolerated).min(rejected) < 1000 {
        runs += 1;
        assert!(runs < count + 10_000_000, "{accepted} accepted, {tolerated} tolerated, {rejected} rejected");
        let bytes = damaged(&seeds[numbers.below(seeds.len())], &mut numbers);
        let context = Context {
            four_octet: numbers.below(4) > 0,
            internal: numbers.below(2) > 0,
            extended_next_hop: numbers.below(2) > 0,
            families: if numbers.below(4) > 0 { Families::BOTH } else { Families::from_iter([Family::Ipv4]) },
        };
        let _ = codec::length(&bytes);
        match Message::decode(&bytes, &context) {
            Ok(Message::Update(update)) => {
                if update.problems.is_empty() {
                    accepted += 1
                } else {
                    tolerated += 1
                }
                written(&update, &context);
            }
            Ok(Message::Open(open)) => {
                accepted += 1;
                let again = Message::decode(&codec::encode_open(&open), &context);
                assert_eq!(again, Ok(Message::Open(open)));
            }
            Ok(Message::Notification(notification)) => {
                let _ = (notification.to_string(), notification.communication());
            }
            Ok(Message::Keepalive | Message::RouteRefresh { .. }) => accepted += 1,
            Err(notification) => {
                rejected += 1;
                assert!(notification.code > 0, "{notification:?}");
                assert!(codec::encode_notification(&notification).len() <= 4096);
            }
        }
    }
}

/// What was accepted is the same after it was written and read.
fn written(update: &codec::Update, context: &Context) {
    let full =
        Context { four_octet: true, internal: true, extended_next_hop: true, families: Families::BOTH };
    for announcement in &update.announced {
        let family = Family::of(&announcement.prefixes[0]);
        assert!(context.families.contains(family));
        let Some(messages) =
            codec::encode_announcement(&announcement.attributes, family, &announcement.prefixes, &full)
        else {
            continue;
        };
        let mut read = Vec::new();
        for message in messages {
            let Ok(Message::Update(again)) = Message::decode(&message, &full) else { panic!("{message:?}") };
            assert_eq!(again.problems, []);
            for again in again.announced {
                assert_eq!(again.attributes, announcement.attributes);
                read.extend(again.prefixes);
            }
        }
        assert_eq!(read, announcement.prefixes);
    }
}
