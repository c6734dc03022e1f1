Traceback (most recent call last):
  File "/tmp/wb/wt/cli/benchmarks/inspectors.py", line 109, in <module>
    main()
  File "/tmp/wb/wt/cli/benchmarks/inspectors.py", line 105, in main
    paint(path)
  File "/tmp/wb/wt/cli/benchmarks/inspectors.py", line 66, in paint
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/tmp/wb/venv/lib/python3.11/site-packages/playwright/sync_api/_generated.py", line 4113, in launch
    self._sync(
  File "/tmp/wb/venv/lib/python3.11/site-packages/playwright/_impl/_sync_base.py", line 124, in _sync
    return task.result()
           ^^^^^^^^^^^^^
  File "/tmp/wb/venv/lib/python3.11/site-packages/playwright/_impl/channel_owner.py", line 387, in finish
    raise e from None
  File "/tmp/wb/venv/lib/python3.11/site-packages/playwright/_impl/channel_owner.py", line 352, in finish
    result = await zone.run_async(lambda: awaitable)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/tmp/wb/venv/lib/python3.11/site-packages/playwright/_impl/utils/zones.py", line 58, in run_async
    return await func()
           ^^^^^^^^^^^^
  File "/tmp/wb/venv/lib/python3.11/site-packages/playwright/_impl/browser_type.py", line 176, in launch
    await self._channel.launch(
  File "/tmp/wb/venv/lib/python3.11/site-packages/playwright/_impl/channel_owner.py", line 398, in _mapped
    return mapper(await awaitable)
                  ^^^^^^^^^^^^^^^
playwright._impl._errors.Error: BrowserType.launch: Failed to launch chromium because executable doesn't exist at /nope
