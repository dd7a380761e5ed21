//! The move of a cluster from one IPPool to another (`tortie pool migrate`): close the old pool, move pods node by node, then
//! tunnel addresses and Services, remove blocks, delete the old pool.
//!
//! [`next_step`] says what to do next, and looks only at what is observed, so whoever is interrupted starts again. Two facts that
//! cannot be observed are recorded together with the write that they belong to: which nodes were cordoned ([`NodeRecord`]), and to
//! which pool the old one moves, since when ([`PoolRecord`]).

mod checks;
mod forecast;
mod observed;
mod permissions;
mod places;
mod read;
mod room;
mod run;
mod steps;
mod taints;

pub use forecast::forecast;
pub use observed::{
    LeftAddress, MigratingCluster, MigratingNode, MigratingPod, MigratingService, MigrationRequest,
    NodeRecord, OldBlock, OldPool, PoolRecord, TunnelAddress, WaitingPod, WhichPods,
};
pub use run::{MigrationError, MigrationProgress, PoolMigration, pool_like};
pub use steps::{MigrationStep, MigrationTimes, next_step};
pub use taints::{Taint, Toleration};
