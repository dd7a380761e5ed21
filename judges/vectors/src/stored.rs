//! Documents, and what calicoctl stored in etcd for them.

use std::time::Instant;

use anyhow::{Context as _, Result};
use serde_json::Value;
use tortie_api::{Kind, manifest};
use tortie_store::calico_form::{Origin, complete};

use super::Tally;

/// The words that stand for what differs from run to run.
const ORIGIN: Origin<'static> = Origin { uid: "<uid>", created: "<creationTimestamp>" };

/// Returns the number of documents whose form differs from what calicoctl stored.
pub(super) fn replay(file: &str, lines: &[Value]) -> Result<usize> {
    let begun = Instant::now();
    let mut tally = Tally::default();
    for (number, line) in lines.iter().enumerate() {
        let number = number + 1;
        let stored =
            line["stored"].as_object().with_context(|| format!("{file}:{number}: nothing is stored"))?;
        let of = |field: &str| line["document"][field].as_str().unwrap_or_default();
        let name = of("kind");
        let kind = Kind::of(of("apiVersion"), name);
        let (Some(kind), Some(stored), 1) = (kind, stored.values().next(), stored.len()) else {
            tally.leave_out("of several keys, or of an unknown kind", 1);
            continue;
        };
        // What Tortie does not understand stays as it is.
        let objects = manifest::read("document", &line["document"].to_string());
        let Some(object) = objects.ok().and_then(|objects| objects.into_iter().next()) else {
            tally.leave_out("that Tortie's manifest reader refuses", 1);
            continue;
        };
        let mut ours = object.value;
        complete(kind, &mut ours, ORIGIN);
        tally.cases += 1;
        if ours != *stored {
            tally.differences.push(format!("{number}: {name}\n    ours:   {ours}\n    stored: {stored}"));
        }
    }
    tally.close(file, &"Calico's form", begun)
}
