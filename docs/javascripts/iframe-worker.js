// Browsers start no worker for a page at file://, and search runs in one. There, a hidden frame of the same page
// stands in: the worker's script runs in it, and messages go either way as a worker's would.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })))
      const script = frame.contentDocument.createElement("script")
      script.src = new URL(url, location.href)
      this.loaded = new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }))
      frame.contentDocument.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })))
    }
  }
}
