//! [`CudaGpu`]: a CUDA device whose symmetric memory comes from NVSHMEM or NCCL.
//!
//! The driver, NVSHMEM's host library and NCCL are loaded at run time. The binary therefore starts on any machine, and the error of opening
//! a device names the missing one in one line. A single PE needs neither NVSHMEM nor NCCL.
//!
//! All operations use the same stream until another is selected, and therefore run in call order.

mod cluster;
mod context;
pub mod device;
pub mod driver;
mod exchange;
mod graph;
mod host;
pub mod modules;
pub mod nccl;
mod stream;
mod symmetric;
mod symmetric_memory;
mod tensor_map;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use context::Context;
use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUmodule,
};
pub use device::DeviceInfo;
use driver::{Driver, call};
pub use graph::Graph;
pub use host::{check_host, check_times, pe_environment, visible_devices, visible_limits};
use nccl::windows::CollectiveContext;
use symmetric::{Symmetric, SymmetricSource};

use super::nvshmem::Bootstrap;
use super::{DeviceLimits, Gpu, GpuError, Launch, Recording, SymmetricBy, TensorMap, network_only};

/// The number of marks that [`Gpu::mark`] accepts.
pub const MARKS: usize = 64;
/// The interval at which a wait with a limit queries the stream.
const POLL: Duration = Duration::from_micros(50);

/// One PE's device.
pub struct CudaGpu {
    driver: &'static Driver,
    info: DeviceInfo,
    wait_limit: Duration,
    network_only: bool,
    bootstrap: Box<dyn Bootstrap>,
    multiprocessors: u32,
    fewest_multiprocessors: u32,
    modules: Vec<CUmodule>,
    functions: RefCell<HashMap<String, CUfunction>>,
    /// For each function whose limit of dynamic shared memory was raised above the default: that limit, bytes.
    shared: RefCell<HashMap<String, u32>>,
    marks: [Cell<CUevent>; MARKS],
    symmetric: Symmetric,
    // The last field, so that the context is dropped after everything that is allocated in it.
    context: Context,
}

impl CudaGpu {
    /// Selects this PE's device by the PE's rank on the host and loads the kernels (collective). If there are several PEs, they use
    /// NVSHMEM. In this call and in later collective allocations a PE waits at most `wait_limit` for the others.
    ///
    /// # Errors
    /// Returns [`GpuError::Unavailable`] if there is no driver or no suitable device, if there are several PEs and no NVSHMEM, or if the
    /// PEs' devices differ.
    pub fn attach(bootstrap: impl Bootstrap + 'static, wait_limit: Duration) -> Result<Self, GpuError> {
        Self::attach_by(SymmetricBy::Nvshmem, bootstrap, wait_limit)
    }

    /// Like [`CudaGpu::attach`], but with the given provider of symmetric memory. NCCL is used even for a single PE.
    ///
    /// # Errors
    /// Returns the same errors as [`CudaGpu::attach`]. With NCCL returns [`GpuError::Unavailable`] as well if its version is too old, the
    /// PEs run on several hosts, or the devices cannot access each other's memory.
    pub fn attach_by(
        by: SymmetricBy,
        bootstrap: impl Bootstrap + 'static,
        wait_limit: Duration,
    ) -> Result<Self, GpuError> {
        let source = match by {
            SymmetricBy::Nvshmem => SymmetricSource::Nvshmem,
            SymmetricBy::Nccl => SymmetricSource::Nccl,
        };
        Self::attach_over(source, None, Box::new(bootstrap), wait_limit)
    }

    /// Like [`CudaGpu::attach`], but uses the device with this index among the visible ones, as a framework numbers them.
    ///
    /// # Errors
    /// Returns the same errors as [`CudaGpu::attach`].
    pub fn attach_device(
        number: usize,
        bootstrap: impl Bootstrap + 'static,
        wait_limit: Duration,
    ) -> Result<Self, GpuError> {
        Self::attach_over(SymmetricSource::Nvshmem, Some(number), Box::new(bootstrap), wait_limit)
    }

    /// Like [`CudaGpu::attach_by`] with NCCL, but uses a communicator of the caller, for example that of a PyTorch process group
    /// (`ProcessGroupNCCL._comm_ptr()`). `communicator` is its address. Its ranks must be the PEs in the same order, and its device becomes
    /// this PE's device. The caller still owns the communicator, even after [`CudaGpu::finish`].
    ///
    /// # Safety
    /// - `communicator` is an `ncclComm_t` of the NCCL library that is loaded in this process, and outlives the returned value.
    /// - No other thread uses the communicator during this call or a call that allocates or frees symmetric memory. All processes make
    ///   these calls in the same order relative to their other uses of the communicator, because the calls register memory, which is
    ///   collective.
    ///
    /// # Errors
    /// Returns the same errors as [`CudaGpu::attach_by`], and [`GpuError::Unavailable`] if the communicator's ranks differ from the PEs.
    pub unsafe fn attach_communicator(
        communicator: usize,
        bootstrap: impl Bootstrap + 'static,
        wait_limit: Duration,
    ) -> Result<Self, GpuError> {
        Self::attach_over(SymmetricSource::Communicator(communicator), None, Box::new(bootstrap), wait_limit)
    }

    /// `number` is the device's index; without it, the rank on the host chooses the device.
    fn attach_over(
        source: SymmetricSource,
        number: Option<usize>,
        bootstrap: Box<dyn Bootstrap>,
        wait_limit: Duration,
    ) -> Result<Self, GpuError> {
        let driver = driver::driver()?;
        let network_only = network_only()?;
        if network_only && !matches!(source, SymmetricSource::Nvshmem) {
            return Err(GpuError::Unavailable(
                "ARISTOS_REACH network needs `symmetric` nvshmem: NCCL's windows have no network".into(),
            ));
        }
        let local = exchange::rank_on_host(&*bootstrap, wait_limit)?;
        let (device, info) = match (source, number) {
            (_, Some(number)) => device::numbered(driver, number)?,
            (SymmetricSource::Communicator(communicator), None) => {
                // SAFETY: only `attach_communicator` passes a communicator, and its caller guarantees that it is valid.
                let number = unsafe { nccl::windows::device_of(communicator) }?;
                device::numbered(driver, number)?
            }
            _ => device::choose(driver, local)?,
        };
        let percentage = std::env::var(device::MPS_SHARE).ok();
        let multiprocessors = device::share(info.multiprocessors, percentage.as_deref());
        let agreed = exchange::agree(&*bootstrap, &info, multiprocessors, wait_limit)?;
        let context = Context::new(driver, device, &info)?;
        let symmetric = Symmetric::start(
            source,
            &agreed,
            CollectiveContext { context: &context, bootstrap: &*bootstrap, limit: wait_limit },
        )?;

        let mut gpu = CudaGpu {
            driver,
            info,
            wait_limit,
            network_only,
            bootstrap,
            multiprocessors,
            fewest_multiprocessors: agreed.fewest_multiprocessors,
            modules: Vec::new(),
            functions: RefCell::default(),
            shared: RefCell::default(),
            marks: [const { Cell::new(ptr::null_mut()) }; MARKS],
            symmetric,
            context,
        };
        for module in modules::modules_for(gpu.info.hopper()) {
            gpu.load(module)?;
        }
        Ok(gpu)
    }

    /// The device's properties as reported by the driver.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Releases symmetric memory and modules after a successful job (collective). If a value is dropped without this call, they are
    /// released when the process exits.
    ///
    /// # Errors
    /// Returns [`GpuError::Barrier`] if a PE is missing, and the driver's error if the driver fails.
    pub fn finish(mut self) -> Result<(), GpuError> {
        self.barrier(self.wait_limit)?;
        match std::mem::replace(&mut self.symmetric, Symmetric::Alone) {
            Symmetric::Alone => {}
            Symmetric::Nvshmem(nvshmem) => nvshmem.finish(),
            Symmetric::Nccl(windows) => windows.finish(),
        }
        for module in self.modules.drain(..) {
            // SAFETY: `load` loaded the module, and none of its kernels runs after the barrier.
            self.driver.check(unsafe { call!(self.driver, cuModuleUnload(module)) }, || "unload the kernels".into())?;
        }
        Ok(())
    }

    fn load(&mut self, module: &modules::Module) -> Result<(), GpuError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the function only writes the handle, and the image is a static fat binary.
        let code = unsafe { call!(self.driver, cuModuleLoadData(&raw mut handle, module.image.0.as_ptr().cast())) };
        let (major, minor) = self.info.capability;
        match code {
            driver::NO_BINARY_FOR_GPU | driver::UNSUPPORTED_PTX => {
                return Err(GpuError::Unavailable(format!(
                    "the kernels ({}, {}, made by CUDA {}) do not run on {} (compute capability {major}.{minor}) with a \
                     driver of CUDA {}: install a newer driver, or build with that CUDA (CUDA_HOME)",
                    module.name,
                    module.architectures,
                    modules::MADE_BY,
                    self.info.name,
                    driver::version().map_or("?".into(), |version| version.to_string()),
                )));
            }
            code => self.driver.check(code, || format!("load the kernels ({})", module.name))?,
        }
        self.modules.push(handle);
        // If NVSHMEM is not in use, its state in the module stays uninitialised, which is safe because the kernels then do not call it.
        if module.nvshmem
            && let Symmetric::Nvshmem(nvshmem) = &self.symmetric
        {
            // SAFETY: the module was just loaded into the current context, and `finish` finalises NVSHMEM before unloading it.
            unsafe { nvshmem.add_module(handle.cast(), module.name) }?;
        }
        Ok(())
    }

    fn function(&self, kernel: &str) -> Result<CUfunction, GpuError> {
        if let Some(function) = self.functions.borrow().get(kernel) {
            return Ok(*function);
        }
        let name = CString::new(kernel).map_err(|error| GpuError::failed(format!("find kernel {kernel}"), error))?;
        for module in &self.modules {
            let mut function = ptr::null_mut();
            // SAFETY: the call only writes the handle, and the name is NUL-terminated.
            let code = unsafe { call!(self.driver, cuModuleGetFunction(&raw mut function, *module, name.as_ptr())) };
            if code != driver::NOT_FOUND {
                self.driver.check(code, || format!("find kernel {kernel}"))?;
                self.functions.borrow_mut().insert(kernel.to_string(), function);
                return Ok(function);
            }
        }
        Err(GpuError::failed(format!("find kernel {kernel}"), "no module contains it"))
    }

    /// Looks up a function, and raises its limit of dynamic shared memory if `shared_bytes` exceeds it. The default limit is 48 KiB.
    fn function_with_shared(&self, kernel: &str, shared_bytes: u32) -> Result<CUfunction, GpuError> {
        let function = self.function(kernel)?;
        let allowed = self.shared.borrow().get(kernel).copied().unwrap_or(48 << 10);
        if shared_bytes > allowed {
            if shared_bytes > self.info.shared_bytes_per_block {
                return Err(GpuError::failed(
                    format!("launch {kernel}"),
                    format!(
                        "it needs {shared_bytes} bytes of shared memory, and a block of {} has at most {}",
                        self.info.name, self.info.shared_bytes_per_block
                    ),
                ));
            }
            // SAFETY: `function` belongs to a loaded module.
            let code = unsafe {
                call!(
                    self.driver,
                    cuFuncSetAttribute(
                        function,
                        CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        shared_bytes as c_int
                    )
                )
            };
            self.driver.check(code, || format!("give kernel {kernel} {shared_bytes} bytes of shared memory"))?;
            self.shared.borrow_mut().insert(kernel.to_string(), shared_bytes);
        }
        Ok(function)
    }

    fn event(&self, number: usize) -> Result<&Cell<CUevent>, GpuError> {
        self.marks.get(number).ok_or_else(|| GpuError::failed(format!("mark {number}"), "there are 64 marks"))
    }

    /// Waits at most `limit` for all earlier launches. After a time-out, later calls do not wait for the stream, and the process must exit.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] if the launches have not completed after `limit`, and the driver's error if a launch failed.
    pub fn synchronise_within(&self, limit: Duration) -> Result<(), GpuError> {
        let start = Instant::now();
        loop {
            // SAFETY: the context owns the stream and lives as long as `self`.
            match unsafe { call!(self.driver, cuStreamQuery(self.context.stream())) } {
                driver::NOT_READY => {}
                code => return self.driver.check(code, || "wait for the kernels".into()),
            }
            if start.elapsed() >= limit {
                self.context.stuck.set(true);
                return Err(GpuError::failed(
                    "wait for the kernels",
                    format!("PE {}'s have not ended within {:.1} s", self.my_pe(), limit.as_secs_f64()),
                ));
            }
            std::thread::sleep(POLL);
        }
    }

    fn out_of_memory(&self, kind: &'static str, asked: u64) -> GpuError {
        let (free, total) = self.context.memory().unwrap_or((0, self.info.memory_total));
        GpuError::OutOfMemory { kind, asked, free, total }
    }
}

impl Drop for CudaGpu {
    fn drop(&mut self) {
        for mark in &self.marks {
            if !mark.get().is_null() {
                // SAFETY: `mark` created the event, and it is destroyed only here.
                unsafe { call!(self.driver, cuEventDestroy_v2(mark.get())) };
            }
        }
    }
}

// SAFETY: the memory comes from the driver, from NVSHMEM's heap or from NCCL. Every operation either is enqueued on one stream or waits for
// it, so operations take effect in call order.
unsafe impl Gpu for CudaGpu {
    fn name(&self) -> String {
        self.info.name.clone()
    }

    fn device_id(&self) -> String {
        self.info.pci.clone()
    }

    fn limits(&self) -> Result<DeviceLimits, GpuError> {
        let (free, total) = self.context.memory()?;
        Ok(DeviceLimits {
            capability: self.info.capability,
            multiprocessors: self.fewest_multiprocessors,
            shared_bytes_per_block: self.info.shared_bytes_per_block,
            memory_total: total,
            memory_free: free,
            symmetric_total: 0,
        })
    }

    fn my_pe(&self) -> usize {
        self.bootstrap.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.bootstrap.n_pes()
    }

    fn alloc_raw(&self, bytes: u64) -> Result<u64, GpuError> {
        let mut address: CUdeviceptr = 0;
        // SAFETY: the function only writes the address.
        match unsafe { call!(self.driver, cuMemAlloc_v2(&raw mut address, bytes as usize)) } {
            driver::OUT_OF_MEMORY => Err(self.out_of_memory("device", bytes)),
            code => self.driver.check(code, || format!("allocate {bytes} bytes on the device")).map(|()| address),
        }
    }

    unsafe fn free_raw(&self, address: u64) {
        if self.context.stuck.get() {
            return;
        }
        // SAFETY: guaranteed by the caller. Earlier launches may still use the memory, so they complete first. The next call reports their
        // errors.
        unsafe {
            call!(self.driver, cuStreamSynchronize(self.context.stream()));
            call!(self.driver, cuMemFree_v2(address));
        }
    }

    fn alloc_symmetric_raw(&self, bytes: u64) -> Result<u64, GpuError> {
        self.alloc_symmetric(bytes)
    }

    unsafe fn free_symmetric_raw(&self, address: u64) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.free_symmetric(address) }
    }

    fn peer_raw(&self, symmetric: u64, pe: usize) -> u64 {
        self.peer(symmetric, pe)
    }

    fn all_reachable(&self) -> Result<bool, GpuError> {
        self.query_all_reachable()
    }

    unsafe fn copy_in_raw(&self, to: u64, from: &[u8]) -> Result<(), GpuError> {
        if from.is_empty() {
            return Ok(());
        }
        let what = || format!("copy {} bytes to the device", from.len());
        // SAFETY: the caller guarantees the destination, and the driver has read `from` when the synchronisation returns.
        unsafe {
            let stream = self.context.stream();
            self.driver
                .check(call!(self.driver, cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream)), what)?;
            self.driver.check(call!(self.driver, cuStreamSynchronize(stream)), what)
        }
    }

    unsafe fn copy_out_raw(&self, to: &mut [u8], from: u64) -> Result<(), GpuError> {
        if to.is_empty() {
            return Ok(());
        }
        let what = || "copy from the device".to_string();
        // SAFETY: the caller guarantees the source, and the driver has written `to` when the synchronisation returns.
        unsafe {
            let stream = self.context.stream();
            self.driver.check(
                call!(self.driver, cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream)),
                what,
            )?;
            self.driver.check(call!(self.driver, cuStreamSynchronize(stream)), what)
        }
    }

    unsafe fn zero_raw(&self, to: u64, bytes: u64) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        let code = unsafe { call!(self.driver, cuMemsetD8Async(to, 0, bytes as usize, self.context.stream())) };
        self.driver.check(code, || format!("set {bytes} bytes of the device to 0"))
    }

    fn resident_blocks(&self, kernel: &str, launch: Launch) -> Result<u32, GpuError> {
        let Launch { block, shared_bytes, cluster, .. } = launch;
        let function = self.function_with_shared(kernel, shared_bytes)?;
        let mut per_multiprocessor = 0;
        // SAFETY: the call only writes the number, and `function` belongs to a loaded module.
        let code = unsafe {
            call!(
                self.driver,
                cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &raw mut per_multiprocessor,
                    function,
                    block as c_int,
                    shared_bytes as usize,
                )
            )
        };
        let what = || format!("ask how many blocks of {kernel} fit");
        self.driver.check(code, what)?;
        let blocks = u32::try_from(per_multiprocessor).unwrap_or(0) * self.multiprocessors;
        if cluster <= 1 {
            return Ok(blocks);
        }
        // Clusters may leave multiprocessors empty, because each cluster must fit into one group of multiprocessors. SAFETY: `function`
        // belongs to a loaded module.
        let clusters = unsafe { cluster::resident(self.driver, function, launch, self.context.stream()) };
        let clusters = clusters.or_else(|code| self.driver.check(code, what).map(|()| 0))?;
        Ok(clusters.min(blocks / cluster) * cluster)
    }

    fn prepare(&self, kernel: &str, shared_bytes: u32) -> Result<(), GpuError> {
        // If the driver loads functions lazily, the look-up loads this one.
        self.function_with_shared(kernel, shared_bytes).map(|_| ())
    }

    unsafe fn launch(&self, kernel: &str, launch: Launch, args: &[&[u8]]) -> Result<(), GpuError> {
        let Launch { grid, block, shared_bytes, cooperative, cluster } = launch;
        let function = self.function_with_shared(kernel, shared_bytes)?;
        if cooperative != 0 {
            let fit = self.resident_blocks(kernel, launch)?;
            if grid > fit {
                return Err(GpuError::failed(
                    format!("launch {kernel}"),
                    format!(
                        "{grid} blocks of {block} threads and {shared_bytes} bytes of shared memory must run at the same \
                         time, and {fit} do on {} of {}'s multiprocessors",
                        self.multiprocessors, self.info.name
                    ),
                ));
            }
        }
        // The parameters are copied so that each is aligned sufficiently for any type.
        let mut copies: Vec<Vec<u128>> = args.iter().map(|arg| vec![0; arg.len().div_ceil(16)]).collect();
        for (copy, arg) in copies.iter_mut().zip(args) {
            bytemuck::cast_slice_mut(copy)[..arg.len()].copy_from_slice(arg);
        }
        let mut pointers: Vec<*mut c_void> = copies.iter_mut().map(|copy| copy.as_mut_ptr().cast()).collect();
        let (parameters, stream) = (pointers.as_mut_ptr(), self.context.stream());
        // SAFETY: the caller guarantees the parameters, and the driver copies them before the call returns.
        let code = unsafe {
            if cooperative != 0 && cluster > 1 {
                cluster::launch(self.driver, function, launch, stream, parameters)
            } else if cooperative != 0 {
                call!(
                    self.driver,
                    cuLaunchCooperativeKernel(function, grid, 1, 1, block, 1, 1, shared_bytes, stream, parameters,)
                )
            } else {
                let none = ptr::null_mut();
                call!(
                    self.driver,
                    cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared_bytes, stream, parameters, none)
                )
            }
        };
        match code {
            driver::COOPERATIVE_TOO_LARGE => Err(GpuError::failed(
                format!("launch {kernel}"),
                format!(
                    "{grid} blocks do not run at the same time: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE must be at most 100 \
                     divided by the number of PEs on this GPU"
                ),
            )),
            code => self.driver.check(code, || format!("launch {kernel} ({grid} blocks of {block} threads)")),
        }
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<(), GpuError>) -> Result<Box<dyn Recording + '_>, GpuError> {
        Ok(Box::new(self.capture(work)?))
    }

    fn synchronise(&self) -> Result<(), GpuError> {
        // SAFETY: the context owns the stream and lives as long as `self`.
        let code = unsafe { call!(self.driver, cuStreamSynchronize(self.context.stream())) };
        self.driver.check(code, || "wait for the kernels".into())
    }

    fn barrier(&self, limit: Duration) -> Result<(), GpuError> {
        let start = Instant::now();
        if let Symmetric::Nvshmem(nvshmem) = &self.symmetric {
            // SAFETY: the stream belongs to this PE's context.
            unsafe { nvshmem.quiet_on_stream(self.context.stream().cast()) }
        }
        self.synchronise_within(limit)?;
        self.bootstrap.barrier(limit.saturating_sub(start.elapsed()))
    }

    fn mark(&self, number: usize) -> Result<(), GpuError> {
        let mark = self.event(number)?;
        let what = || format!("note time {number}");
        if mark.get().is_null() {
            let mut event = ptr::null_mut();
            // SAFETY: the function only writes the event.
            self.driver.check(unsafe { call!(self.driver, cuEventCreate(&raw mut event, 0)) }, what)?;
            mark.set(event);
        }
        // SAFETY: the event and the stream are destroyed only when `self` is dropped.
        self.driver.check(unsafe { call!(self.driver, cuEventRecord(mark.get(), self.context.stream())) }, what)
    }

    fn elapsed(&self, from: usize, to: usize) -> Result<Duration, GpuError> {
        let what = || format!("tell the time from mark {from} to mark {to}");
        let (first, second) = (self.event(from)?.get(), self.event(to)?.get());
        if first.is_null() || second.is_null() {
            return Err(GpuError::failed(what(), "one was not made"));
        }
        let mut milliseconds = 0.0;
        // SAFETY: the function only writes the number, and both events belong to this context.
        let code = unsafe { call!(self.driver, cuEventElapsedTime(&raw mut milliseconds, first, second)) };
        self.driver.check(code, what)?;
        Duration::try_from_secs_f64(f64::from(milliseconds) * 1e-3).map_err(|error| GpuError::failed(what(), error))
    }

    fn use_stream(&self, stream: Option<u64>) -> Result<(), GpuError> {
        self.context.use_stream(stream)
    }

    fn alloc_host_raw(&self, bytes: u64) -> Result<u64, GpuError> {
        const FLAGS: u32 = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        let mut memory: *mut c_void = ptr::null_mut();
        // SAFETY: the function only writes the address, and only the allocated bytes are zeroed. The device uses the same address, because
        // addressing is unified.
        unsafe {
            let code = call!(self.driver, cuMemHostAlloc(&raw mut memory, bytes as usize, FLAGS));
            self.driver.check(code, || format!("allocate {bytes} bytes of the host's memory for the device"))?;
            memory.cast::<u8>().write_bytes(0, bytes as usize);
        }
        Ok(memory.expose_provenance() as u64)
    }

    unsafe fn free_host_raw(&self, address: u64) {
        if !self.context.stuck.get() {
            // SAFETY: guaranteed by the caller.
            unsafe { call!(self.driver, cuMemFreeHost(ptr::with_exposed_provenance_mut(address as usize))) };
        }
    }

    fn tensor_map(&self, matrix: TensorMap) -> Result<[u8; 128], GpuError> {
        tensor_map::encode(self.driver, &matrix)
    }
}
