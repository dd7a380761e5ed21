//! Replaces Kubernetes' EndpointSlice controller: Services with a selector get slices of the pods that it selects.

use tortie_api::Kind;
use tortie_api::kubernetes::{implied_slices, is_implied};
use tortie_store::{Stored, Write};

/// The inputs of slices, and slices themselves.
pub(crate) const KINDS: [Kind; 3] = [Kind::Service, Kind::Pod, Kind::EndpointSlice];

/// The writes after which the slices match those that Services and pods imply.
pub(crate) fn missing_writes(objects: &[&Stored]) -> Vec<Write> {
    let mut wanted = implied_slices(objects.iter().map(|stored| (&stored.key, &stored.value)));
    let mut writes = Vec::new();
    for stored in objects.iter().filter(|stored| stored.key.kind == Kind::EndpointSlice) {
        let (key, version) = (stored.key.clone(), stored.version.clone());
        match wanted.remove(&key) {
            Some(value) if value == stored.value => {}
            Some(value) => writes.push(Write::Update(key, value, version)),
            None if is_implied(&stored.value) => writes.push(Write::Delete(key, Some(version))),
            None => {}
        }
    }
    writes.extend(wanted.into_iter().map(|(key, value)| Write::Create(key, value)));
    writes
}
