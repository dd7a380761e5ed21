//! Random histories that are forked, as by a restore from a backup.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use testkit::random::Random;

use super::*;
use crate::etcd::message::{RangeResponse, ResponseHeader, ResponseOp, WatchEvent};

/// The keys that are written at a revision, with their values; `None` is a deletion.
type Writes = BTreeMap<u16, Option<u8>>;
/// The writes of a store, by revision.
type History = Vec<Writes>;

/// The keys at a revision, as etcd has them.
fn keys_at(history: &[Writes], revision: usize) -> BTreeMap<u16, KeyValue> {
    let mut keys: BTreeMap<u16, KeyValue> = BTreeMap::new();
    for (at, writes) in history.iter().enumerate().take(revision) {
        for (key, value) in writes {
            let version = keys.get(key).map_or(1, |found| found.version + 1);
            let mod_revision = at as i64 + 1;
            let (key_bytes, bytes) = (key.to_be_bytes().to_vec(), value.iter().copied().collect());
            let found =
                KeyValue { key: key_bytes, mod_revision, version, value: bytes, ..KeyValue::default() };
            match value {
                Some(_) => drop(keys.insert(*key, found)),
                None => drop(keys.remove(key)),
            }
        }
    }
    keys
}

/// The answers to a watch between two revisions. A key that does not exist has no deletion, and a revision without events is reported as progress.
fn answers(history: &[Writes], after: usize, until: usize) -> Vec<WatchResponse> {
    let at = |revision: usize| {
        let (before, now) = (keys_at(history, revision - 1), keys_at(history, revision));
        let writes = history[revision - 1].iter().filter_map(move |(key, value)| {
            let kind = if value.is_some() { EventType::Put } else { EventType::Delete };
            let deleted = KeyValue {
                key: key.to_be_bytes().to_vec(),
                mod_revision: revision as i64,
                ..KeyValue::default()
            };
            let found =
                if value.is_some() { now.get(key).cloned() } else { before.get(key).map(|_| deleted) };
            Some(WatchEvent { kind: kind.into(), kv: Some(found?) })
        });
        let header = Some(ResponseHeader { revision: revision as i64 });
        WatchResponse { header, events: writes.collect(), ..WatchResponse::default() }
    };
    (after + 1..=until).map(at).collect()
}

/// The answer of etcd to a question.
fn answer(history: &[Writes], question: &TxnRequest) -> TxnResponse {
    let responses = question.success.iter().map(|operation| {
        let Some(TxnOperation::Range(range)) = &operation.request else { panic!("{operation:?}") };
        let keys = keys_at(history, range.revision as usize);
        let found = keys.values().filter(|found| match range.range_end.as_slice() {
            [] => found.key == range.key,
            _ => true,
        });
        let mut kvs: Vec<KeyValue> = found.cloned().collect();
        let count = kvs.len() as i64;
        kvs.sort_by_key(|found| std::cmp::Reverse(found.mod_revision));
        kvs.truncate(range.limit as usize);
        ResponseOp { range: Some(RangeResponse { kvs, count, ..RangeResponse::default() }) }
    });
    TxnResponse { responses: responses.collect(), ..TxnResponse::default() }
}

/// A witness that listed at one revision, and has seen the events since, some of them twice.
fn witness(history: &[Writes], listed: usize, until: usize) -> Witness {
    let all = Witnesses::of_follower();
    let keys = keys_at(history, listed);
    all.begin(Kind::Tier, listed as i64, keys.len() as i64);
    let pages: Vec<KeyValue> = keys.into_values().collect();
    pages.chunks(3).for_each(|page| all.change(Kind::Tier, |witness| witness.listed(page)));
    for reply in answers(history, listed, until) {
        all.change(Kind::Tier, |witness| witness.observe(&reply));
        all.change(Kind::Tier, |witness| witness.observe(&reply));
    }
    all.of(Kind::Tier).unwrap()
}

fn range() -> Range {
    Range { start: vec![0], end: vec![1] }
}

/// Revisions without writes are those of other kinds.
fn history(length: std::ops::Range<usize>) -> impl Strategy<Value = History> {
    let writes = prop_oneof![
        2 => Just(Writes::new()),
        3 => proptest::collection::btree_map(0..300_u16, proptest::option::weighted(0.6, any::<u8>()), 1..4),
    ];
    vec(writes, length)
}

#[test]
fn the_same_history_is_confirmed() {
    let cases = (history(1..60), any::<prop::sample::Index>(), any::<prop::sample::Index>());
    let result = Random::cases(500).run(&cases, |(history, listed, until)| {
        let listed = listed.index(history.len()) + 1;
        let until = listed + until.index(history.len() - listed + 1);
        let witness = witness(&history, listed, until);
        prop_assert!(witness.is_confirmed_by(&answer(&history, &witness.question(&range()))));
        Ok(())
    });
    result.unwrap();
}

/// What a forked history has instead goes unnoticed only by an accident: both have written the same key at the same revision, or both have
/// only deleted.
#[test]
fn a_forked_history_is_noticed() {
    let cases = (history(1..20), history(1..20), history(20..40), any::<prop::sample::Index>());
    let result = Random::cases(500).run(&cases, |(common, lost, restored, listed)| {
        let old = [common.clone(), lost].concat();
        let new = [common.clone(), restored].concat();
        let listed = listed.index(old.len()) + 1;
        let witness = witness(&old, listed, old.len());
        let at = witness.revision as usize;
        let (before, now) = (keys_at(&old, at), keys_at(&new, at));
        let newest = |keys: &BTreeMap<u16, KeyValue>| keys.values().map(|found| found.mod_revision).max();
        let is_accident = before.len() == now.len() && newest(&before) == newest(&now);
        let is_confirmed = witness.is_confirmed_by(&answer(&new, &witness.question(&range())));
        prop_assert!(!is_confirmed || before == now || is_accident, "{:?} {:?}", before, now);
        Ok(())
    });
    result.unwrap();
}

/// A fork for each thing that a witness remembers. A listing does not tell which keys were deleted before it.
#[test]
fn each_difference_is_noticed() {
    let put = |keys: &[u16]| keys.iter().map(|key| (*key, Some(0))).collect::<Writes>();
    let delete = |key: u16| Writes::from([(key, None)]);
    let common = vec![put(&[1]), put(&[2]), put(&[3])];
    for (lost, restored, what) in [
        (put(&[4]), put(&[5]), "another key was created"),
        (put(&[1]), put(&[2]), "another key was updated"),
        (put(&[1]), Writes::from([(1, Some(9))]), "it was updated otherwise"),
        (put(&[1]), Writes::new(), "an update is missing"),
        (delete(1), Writes::new(), "a deletion is missing"),
        (delete(1), delete(2), "another key was deleted"),
        (Writes::new(), put(&[1]), "an update was not seen"),
        (Writes::new(), delete(1), "a deletion was not seen"),
    ] {
        let old = [common.clone(), vec![lost]].concat();
        let new = [common.clone(), vec![restored, put(&[9])]].concat();
        for listed in [3, 4] {
            let witness = witness(&old, listed, 4);
            assert_eq!(witness.revision, 4);
            let answer = answer(&new, &witness.question(&range()));
            let is_told = listed == 3 || what != "another key was deleted";
            assert_eq!(witness.is_confirmed_by(&answer), !is_told, "{what}, listed at {listed}");
        }
    }
}
