//! Owned, borrowed or shared access to a [`Shmem`].

use std::rc::Rc;
use std::sync::Arc;

use super::{Shmem, Transport};

/// Lets an API accept an owned, borrowed or reference-counted [`Shmem`].
pub trait AsShmem {
    /// The transport of the [`Shmem`].
    type Transport: Transport;

    /// The [`Shmem`] of this PE.
    fn as_shmem(&self) -> &Shmem<Self::Transport>;
}

impl<T: Transport> AsShmem for Shmem<T> {
    type Transport = T;

    fn as_shmem(&self) -> &Shmem<T> {
        self
    }
}

macro_rules! pointers {
    ($($pointer:ty),*) => {$(
        impl<S: AsShmem + ?Sized> AsShmem for $pointer {
            type Transport = S::Transport;

            fn as_shmem(&self) -> &Shmem<S::Transport> {
                (**self).as_shmem()
            }
        }
    )*};
}

pointers!(&S, Box<S>, Rc<S>, Arc<S>);
