//! The fields of KubeControllersConfiguration.

use super::State::{Implemented, Rejected, Reported};
use super::Takes::{Duration, Integer, Objects, Word};
use super::{Field, Takes, field};

const SWITCH: Takes = Word(&["Enabled", "Disabled", ""]);
const LEVELS: Takes = Word(&["None", "Debug", "Info", "Warning", "Error", "Fatal", "Panic", ""]);
const PORT: Takes = Integer(0, 65535);
const ON_CHANGE: &str = "the controllers follow what they copy, and have no period";
const LEAKS: &str =
    "agents release the addresses that their pods leave behind, and --node-grace is for vanished nodes";
const LOG: &str = "the environment variable RUST_LOG sets the level";
const NO_PORT: &str = "the controllers have no such port";
const COMPACTION: &str = "set --auto-compaction-retention of etcd";
const TEMPLATES: &str =
    "only the host endpoint for all interfaces is created; apply other host endpoints yourself";
const NO_RENAMING: &str = "Tortie renames no policies";

/// The fields of `spec`, by path. Calico's client writes 15m0s, Enabled and 9094 into each object, so they say nothing about what an operator
/// wants.
pub(super) const FIELDS: &[Field] = &[
    field(
        "controllers.loadBalancer.assignIPs",
        Word(&["AllServices", "RequestedServicesOnly", ""]),
        Implemented,
        &[],
    ),
    field("controllers.namespace.reconcilerPeriod", Duration, Reported(ON_CHANGE), &["5m0s"]),
    field("controllers.node.hostEndpoint.autoCreate", SWITCH, Implemented, &[]),
    field("controllers.node.hostEndpoint.createDefaultHostEndpoint", SWITCH, Implemented, &[]),
    field("controllers.node.hostEndpoint.templates", Objects, Rejected(TEMPLATES), &["[]"]),
    field("controllers.node.leakGracePeriod", Duration, Reported(LEAKS), &["15m0s"]),
    field("controllers.node.reconcilerPeriod", Duration, Reported(ON_CHANGE), &["5m0s"]),
    field("controllers.node.syncLabels", SWITCH, Implemented, &[]),
    field("controllers.policy.reconcilerPeriod", Duration, Reported(ON_CHANGE), &["5m0s"]),
    field("controllers.migration.policyNameMigrator", SWITCH, Reported(NO_RENAMING), &["Disabled"]),
    field("controllers.policyMigration.enabled", SWITCH, Reported(NO_RENAMING), &["Disabled"]),
    field("controllers.serviceAccount.reconcilerPeriod", Duration, Reported(ON_CHANGE), &["5m0s"]),
    field("controllers.workloadEndpoint.reconcilerPeriod", Duration, Reported(ON_CHANGE), &["5m0s"]),
    field("debugProfilePort", PORT, Reported(NO_PORT), &["0"]),
    field("etcdV3CompactionPeriod", Duration, Reported(COMPACTION), &["0s", "10m0s"]),
    field("healthChecks", SWITCH, Reported(NO_PORT), &["Disabled", "Enabled"]),
    field("logSeverityScreen", LEVELS, Reported(LOG), &["Info"]),
    field("prometheusMetricsPort", PORT, Reported(NO_PORT), &["0", "9094"]),
];
